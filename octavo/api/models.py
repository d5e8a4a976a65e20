from octavo.core.api.models import *
from octavo.core.api.models import __all__ as __all__
