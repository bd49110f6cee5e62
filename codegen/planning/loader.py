"""Weight loading: every physical slot filled, whatever loads it and from whichever layout."""

from __future__ import annotations

from ..analysis.anatomy import Anatomy
from ..analysis.builds import Builds
from ..analysis.capabilities import Capabilities
from ..analysis.modules import Modules
from ..analysis.weights import Stop
from ..errors import Refusal
from .fused import plan_fused
from .layer_loading import plan_layer_loading
from .loops import plan_loop
from .mapping import plan_mapping
from .plan import Draft


def plan_loader(
    draft: Draft, anatomy: Anatomy, modules: Modules, builds: Builds, offered: Capabilities
) -> None:
    """Fill every physical slot from the tensors of its logical expert.

    Raises:
        Refusal: what loads the experts was not found, or stands in a file that is not patched.
    """
    loading = anatomy.loading
    per_expert = [call for call in loading.mappings if not call.is_fused]
    if not per_expert and not loading.loops:
        plan_layer_loading(draft, anatomy, modules, builds, offered)
        return
    if not per_expert or not loading.loops:
        what = "a loop over the expert mapping" if per_expert else "the expert mapping"
        raise Refusal(f"{what} was not found", anatomy.backbone.where)
    for call in per_expert:
        if not call.has_redundant:
            plan_mapping(draft, anatomy, call, offered)
    for loop in loading.loops:
        if loop.stop is not Stop.REPLICAS:
            plan_loop(draft, anatomy, loop)
    plan_fused(draft, anatomy, per_expert[0])
