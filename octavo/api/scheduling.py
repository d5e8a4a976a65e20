from octavo.core.api.scheduling import *
from octavo.core.api.scheduling import __all__ as _all
from octavo.core.scheduling.state import RequestView

__all__ = ["RequestView", *_all]
