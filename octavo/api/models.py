from octavo.core.api.models import *
from octavo.core.api.models import __all__ as _all
from octavo.core.config.model_spec import ModelSpec, RopeSpec

__all__ = ["ModelSpec", "RopeSpec", *_all]
