"""What runs in each step. No torch."""

from octavo.core.scheduling.policies import FirstComeFirstServed, Priority
from octavo.core.scheduling.scheduler import Scheduler

__all__ = ["FirstComeFirstServed", "Priority", "Scheduler"]
