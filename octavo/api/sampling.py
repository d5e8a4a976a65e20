from octavo.core.api.sampling import *
from octavo.core.api.sampling import __all__ as __all__
