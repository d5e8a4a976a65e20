from octavo.core.api.hooks import *
from octavo.core.api.hooks import __all__ as __all__
