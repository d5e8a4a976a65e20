from octavo.core.config import *
from octavo.core.config import __all__ as __all__
