from octavo.core.api.executor import *
from octavo.core.api.executor import __all__ as __all__
