"""Says before a long start what would keep vLLM from balancing a model's experts.

It reads metadata of installed distributions, the source of vLLM, the folder of generated files
and a model's config.json. It neither imports vLLM nor loads weights.
"""

from .examine import Request, examine
from .finding import Finding, Level

__all__ = ["Finding", "Level", "Request", "examine"]
