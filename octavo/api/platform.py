from octavo.core.api.platform import *
from octavo.core.api.platform import __all__ as __all__
