from octavo.core.api.ops import *
from octavo.core.api.ops import __all__ as __all__
