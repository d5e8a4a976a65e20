from octavo.core.api.scheduling import *
from octavo.core.api.scheduling import __all__ as __all__
