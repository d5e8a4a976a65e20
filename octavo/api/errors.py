from octavo.core.api.errors import *
from octavo.core.api.errors import __all__ as __all__
