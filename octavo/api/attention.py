from octavo.core.api.attention import *
from octavo.core.api.attention import __all__ as __all__
