"""The cases of a job: EPLB off, EPLB on with R redundant experts, and the errors."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import build, checkpoint, checks, reference, slots, wna16
from .eplb import Balancer, moe_model
from .families import FAMILIES
from .ranks import Failed, Ranks

ROUNDS = 6
"""How many differently skewed batches are tried to get slots moved twice."""


class Cases:
    def __init__(self, job: dict[str, Any], ranks: Ranks, folder: Path) -> None:
        self.job, self.ranks, self.folder = job, ranks, folder
        self.family = FAMILIES[job["family"]]
        self.device = torch.device(job["device"])
        self.subject = build.Subject(
            job.get("module"),
            self.family.architecture,
            self.family.module,
            job["methods"],
            wna16.adapt if job["device"] == "cpu" else lambda: None,
        )
        self.out = ranks.reporter

    def run(self, case: dict[str, Any]) -> None:
        self.case = case
        self.layout, self.redundant = case["layout"], case.get("redundant")
        if case["kind"] == "errors":
            known = [name for name in self.job["layouts"] if not self._unknown(name).exists()]
            self.layout = known[0] if known else self.layout
        elif self._unknown(self.layout).exists():
            return
        # Releases to 0.19 draw replicas with torch's generator: ranks must draw alike.
        torch.manual_seed(self.job["seed"])
        kinds = {"on": self._on, "errors": self._errors}
        kinds["reference"] = kinds["off"] = self._off
        kinds[case["kind"]]()

    # What every case does

    def _check(
        self, check: str, passed: bool | None, what: str, figure: str = "", detail: str = ""
    ) -> None:
        """Rank 0 speaks for all: what it says was gathered from every rank."""
        if self.ranks.rank == 0:
            status = {True: "passed", False: "failed", None: "not run"}[passed]
            self.out.check(check, status, what, figure, detail)

    def _skip(self, check: str, what: str, why: str) -> None:
        """A check that has no meaning here."""
        if self.ranks.rank == 0:
            self.out.check(check, "skipped", what, detail=why)

    def _unknown(self, layout: str) -> Path:
        """The mark of a layout that upstream's class does not know: outlives these processes."""
        return self.folder / f"unknown-{layout}"

    def _not_run(self, checks: Sequence[str], why: str) -> None:
        for check in checks:
            self._check(check, None, checks_text(check), detail=why)

    def _checkpoint(self, experts: int, name: str = "", **changes: Any) -> Path:
        """The checkpoint of this case: the user's, or a tiny one that rank 0 writes."""
        given = self.job.get("checkpoint")
        if given and not changes:
            return Path(given)
        folder = self.folder / f"checkpoint-{self.layout}-{experts}{name}"

        def write() -> None:
            if self.ranks.rank == 0 and not (folder / "config.json").exists():
                checkpoint.write(
                    folder,
                    self.family,
                    experts,
                    self.layout,
                    self.job["seed"],
                    quantization=self.job["quantization"],
                    **changes,
                )

        self.ranks.apart(write)
        return folder

    def _config(self, folder: Path, redundant: int | None) -> Any:
        config = build.vllm_config(folder, self.ranks.size, redundant, self.job["device"])
        with build.current(config):
            build.initialise(self.ranks.size, self.ranks.rank, self.job["device"])
        return config

    def _build(self, which: str, folder: Path, redundant: int | None) -> tuple[Any, Any, str]:
        """(config, model, error); with the slots judged between loading and processing.

        The first stage that was not left, "building", "loading" or later, is kept in `self.stage`.
        """
        expected = checkpoint.read_experts(folder, self.family)
        tensors = [t for layer in expected.values() for t in layer.values()]
        experts = tensors[0].shape[0] if tensors else 0
        physical = slots.initial_map(experts, redundant or 0)
        judged: list[slots.Slot] = []
        stage = "building"
        self.parameters: dict[str, Any] = {}

        def before(model: Any) -> None:
            nonlocal stage
            stage = "loading"
            slots.fill_with_sentinel(model)
            self.parameters = {
                name: [list(p.shape), str(p.dtype)] for name, p in model.named_parameters()
            }

        def after(model: Any, error: BaseException | None) -> None:
            nonlocal stage
            stage = "loading" if error else "processing loaded weights"
            layers = dict.fromkeys(expected, physical)
            judged.extend(slots.judge(model, expected, self.ranks.rank, layers))

        def work() -> tuple[Any, Any]:
            chosen = self.subject.select(which)
            config = self._config(folder, redundant)
            with build.current(config):
                model = build.load(config, self.job["seed"], before, after)
            if type(model) is not chosen:
                made = f"{type(model).__module__}.{type(model).__name__}"
                raise TypeError(f"vLLM built {made}, not the class under test")
            return config, model

        self.expected, self.experts = expected, experts
        config = model = None
        error = ""
        try:
            config, model = self.ranks.apart(work)
        except Failed as failed:
            error = str(failed)
        stages = self.ranks.gather(stage)
        self.stage = next(s for s in ("building", "loading", stages[0]) if s in stages)
        self.judged = [s for part in self.ranks.gather(judged) for s in part]
        return config, model, error

    def _slots(self, check: str, when: str, judged: list[slots.Slot], error: str = "") -> bool:
        """Report a gathered judgement of slots, and its map."""
        unknown = sorted({s.parameter for s in judged if s.state == "not judged"})
        judged = [s for s in judged if s.state != "not judged"]
        bad = [s for s in judged if s.state != "right"]
        kinds = sum(len(layer) for layer in self.expected.values())
        want = kinds * (self.experts + (self.redundant or 0))
        passed = not bad and len(judged) == want and not error
        never = sum(s.state != "wrong" for s in bad)
        figure = f"{len(judged) - len(bad)} of {want} right"
        if bad:
            figure += f", {never} never or partly written, {len(bad) - never} wrong"
        detail = [error] if error else []
        detail += [str(s) for s in bad[:8]]
        detail += [f"... and {len(bad) - 8} more"] if len(bad) > 8 else []
        if len(judged) != want and not error:
            detail.append(f"{len(judged)} slot parameters were found, {want} should exist")
        what = f"{when}: every expert parameter of every local slot against the checkpoint"
        self._check(check, passed, what, figure, "\n".join(detail))
        if unknown:
            why = f"what the checkpoint wants of {', '.join(unknown)} is not known"
            self._check(check, None, f"{when}: the values of other expert parameters", detail=why)
        if self.ranks.rank == 0:
            self.out.send("slots", when=when, slots=[s.as_json() for s in judged])
        return passed

    def _tokens(self, number: int = 0) -> torch.Tensor:
        """Batch 0 mixes all tokens; the others repeat a few, which skews routing in every layer."""
        vocabulary = self.family.text(checkpoint.read_config(self.at))["vocab_size"]
        draw = torch.Generator().manual_seed(1000 * self.job["seed"] + number)
        if number == 0:
            tokens = torch.randint(2, min(vocabulary, 240), (96,), generator=draw)
        else:
            few = torch.randint(2, min(vocabulary, 240), (2,), generator=draw)
            tokens = few[(torch.rand(96, generator=draw) < 0.15).long()]
        return tokens.to(self.device)

    def _forward(self, model: Any, config: Any, number: int) -> Any:
        tokens = self._tokens(number)
        with build.current(config):
            return build.forward(model, config, tokens)

    def _path(self, which: str, number: int) -> Path:
        return self.folder / f"logits-{which}-{self.layout}-{number}.pt"

    # The cases

    def _off(self) -> None:
        """EPLB off: the logits that all else is judged by; equal to upstream's class."""
        which = self.case["subject"]
        self.at = self._checkpoint(self.job["experts"])
        config, model, error = self._build(which, self.at, None)
        shown = "upstream's class" if which == "upstream" else "the generated class"
        if which == "upstream" and self._skips_layout(error):
            return
        if error:
            self._check("2 off", False, f"{shown} with EPLB off", detail=f"{self.stage}: {error}")
            return
        found = self._slots("3 slots", "after loading, EPLB off", self.judged)
        with self.ranks.joint("forward passes with EPLB off"):
            for number in range(ROUNDS + 1):
                logits = self._forward(model, config, number)
                if self.ranks.rank == 0:
                    torch.save(logits, self._path(which, number))
            finite = logits is None or bool(logits.isfinite().all())
        if which == "upstream":
            if self.ranks.rank == 0:
                torch.save(self.parameters, self.folder / f"parameters-{self.layout}.pt")
            if self.job.get("module") is None:
                why = "upstream's class is the subject itself"
                self._skip("2 off", checks_text("2 off"), why)
            return
        if self.ranks.rank == 0:
            self._compare_with_upstream(found and finite)

    def _skips_layout(self, error: str) -> bool:
        """Whether upstream's class does not load this layout, and that is no fault."""
        if not self.job["skip_unknown_layouts"]:
            return False
        bad = [slot for slot in self.judged if slot.state not in ("right", "not judged")]
        if not bad and not (error and self.stage == "loading"):
            return False
        self.ranks.apart(lambda: self._unknown(self.layout).touch())
        what = f"upstream's class does not load the {self.layout} layout with EPLB off"
        self._skip("layout", what, error or str(bad[0]))
        return True

    def _compare_with_upstream(self, sound: bool) -> None:
        stored = self.folder / f"parameters-{self.layout}.pt"
        if not stored.exists():
            self._not_run(["2 off"], "upstream's own class did not run with EPLB off")
            return
        theirs = torch.load(stored)
        ours = self.parameters
        names = [n for n in sorted({*theirs, *ours}) if theirs.get(n) != ours.get(n)]
        detail = "\n".join(f"{n}: upstream {theirs.get(n)}, generated {ours.get(n)}" for n in names)
        self._check(
            "2 off",
            not names,
            "parameter names, shapes and types, EPLB off, against upstream's class",
            f"{len(ours) - len(names)} of {len(theirs)} equal",
            detail,
        )
        worst, equal = 0.0, sound
        for number in range(ROUNDS + 1):
            a = torch.load(self._path("upstream", number))
            b = torch.load(self._path("generated", number))
            equal = equal and torch.equal(a, b)
            worst = max(worst, float((a - b).abs().max()))
        what = f"logits of {ROUNDS + 1} batches, EPLB off, bit for bit against upstream's class"
        self._check("2 off", equal, what, f"largest difference {worst:.3g}")

    def _on(self) -> None:
        """EPLB on with R redundant experts."""
        which, redundant = self.case["subject"], self.redundant
        assert redundant is not None
        self.at = self._checkpoint(self.job["experts"])
        config, model, error = self._build(which, self.at, redundant)
        later = ["4 logits", "5 rearrangement", "6 load", "7 handed out", "8 errors"]
        if error and self.stage == "building":
            what = "the model is built with EPLB on"
            self._check("1 protocol", False, what, detail=error)
            self._not_run(["3 slots", *later], "the model could not be built with EPLB on")
            return
        if error:
            self._not_run(["1 protocol"], "the model could not be loaded with EPLB on")
            self._slots("3 slots", f"while {self.stage}", self.judged, error)
            self._not_run(later, "the model could not be loaded with EPLB on")
            return
        moe = moe_model(model)
        held = self._protocol(model, moe)
        self._slots("3 slots", "after loading", self.judged)
        if not held:
            self._not_run(later, "the release does not take the model for a mixture of experts")
            return
        self._balance(model, moe, config)

    def _protocol(self, model: Any, moe: Any) -> bool:
        problems = self.ranks.gather(
            checks.protocol(model, moe, self.experts, self.redundant or 0, self.ranks.size)
        )
        detail = "\n".join(f"rank {r}: {p}" for r, found in enumerate(problems) for p in found)
        what = "the release's own test, every member, MoE layer count and order"
        layers = len(slots.expert_modules(model))
        self._check("1 protocol", not detail, what, f"{layers} MoE layers", detail)
        return moe is not None

    def _balance(self, model: Any, moe: Any, config: Any) -> None:
        with self.ranks.joint("building EplbState"), build.current(config):
            balancer = Balancer(moe, config, self.device)
        problems = self.ranks.gather(checks.handed_out(model, moe))
        detail = "\n".join(f"rank {r}: {p}" for r, found in enumerate(problems) for p in found)
        count = sum(len(list(layer)) for layer in moe.expert_weights)
        what = "weights that EPLB moves: dim 0 is the local slots, contiguous, complete, in order"
        self._check("7 handed out", not detail, what, f"{count} tensors on each rank", detail)

        self._logits("4 logits", model, config, balancer, 0, "before any rearrangement")
        self._recorded("6 load", model, config, balancer, 0)
        moved: list[int] = []
        ratios: list[tuple[float, float]] = []
        for number in range(1, ROUNDS + 1):
            changed, ratio = self._round(model, config, balancer, number)
            if changed:
                moved.append(number)
                ratios.append(ratio)
            if len(moved) == 2:
                break
        what = "rearrangements by the release's own EplbState that moved slots"
        self._check("5 rearrangement", len(moved) >= 2, what, f"{len(moved)}")
        if moved:
            self._logits("5 rearrangement", model, config, balancer, 0, "after the last of them")
            self._recorded("6 load", model, config, balancer, 0)
            self._slots_now(model, balancer)
            self._balancedness(ratios)
        self._metadata(model, moe)

    def _run(
        self, model: Any, config: Any, balancer: Balancer, number: int, keep: bool = False
    ) -> tuple[Any, Any]:
        """(logits, load recorded in this pass); EplbState learns of the load only if `keep`.

        What each layer's experts were really given is left in `self.served`.
        """
        physical = self.experts + (self.redundant or 0)
        served: dict[int, torch.Tensor] = {}

        def observe(layer: Any, ids: torch.Tensor) -> None:
            served[id(layer)] = torch.bincount(ids.flatten().long(), minlength=physical).cpu()

        with self.ranks.joint(f"a forward pass with EPLB on, R = {self.redundant}"):
            before = balancer.recorded.clone()
            balancer.before_forward(len(self._tokens(number)))
            with reference.observing(observe):
                logits = self._forward(model, config, number)
            recorded = (balancer.recorded - before).cpu()
            if not keep:
                balancer.recorded.copy_(before)
        counts = [served.get(id(module)) for _, _, module in slots.expert_modules(model)]
        told = [count for count in counts if count is not None]
        self.served = torch.stack(told) if len(told) == len(counts) else None
        return logits, recorded

    def _step(self, balancer: Balancer, config: Any) -> bool:
        with self.ranks.joint("a step of EplbState"), build.current(config):
            return balancer.step()

    def _logits(
        self, check: str, model: Any, config: Any, balancer: Balancer, number: int, when: str
    ) -> None:
        logits, _ = self._run(model, config, balancer, number)
        if self.ranks.rank:
            return
        which = self.case["subject"]
        stored = self._path(which, number)
        what = f"logits {when} against EPLB off"
        if not stored.exists():
            self._check(check, None, what, detail="the model did not run with EPLB off")
            return
        off = torch.load(stored)
        difference = float((logits - off).abs().max())
        scale = float(off.abs().max())
        allowed = self.job["tolerance"] * scale
        figure = f"largest difference {difference:.3g} on values up to {scale:.3g}"
        digest = hashlib.sha256(logits.cpu().numpy().tobytes()).hexdigest()[:16]
        detail = f"allowed: {allowed:.3g}; SHA-256 of these logits: {digest}..."
        self._check(check, difference <= allowed, what, figure, detail)

    def _loads(self, recorded: Any) -> Any:
        """[MoE layer, physical expert] -> tokens, from what each rank recorded.

        Releases record either the local slots or all physical experts on every rank.
        """
        parts = self.ranks.gather(recorded)
        physical = self.experts + (self.redundant or 0)
        if recorded.shape[1] == physical:
            return parts[0], all(torch.equal(parts[0], p) for p in parts)
        return torch.cat(parts, dim=1), True

    def _recorded(
        self, check: str, model: Any, config: Any, balancer: Balancer, number: int
    ) -> None:
        _, recorded = self._run(model, config, balancer, number)
        loads, alike = self._loads(recorded)
        topk = self.family.text(checkpoint.read_config(self.at))["num_experts_per_tok"]
        want = len(self._tokens(number)) * topk
        sums = loads.sum(1).tolist()
        wrong = [f"MoE layer {i}: {int(s)}" for i, s in enumerate(sums) if s != want]
        if not alike:
            wrong.append("ranks that route the same tokens recorded different loads")
        what = "recorded expert loads of each MoE layer add up to tokens x top-k"
        self._check(check, not wrong, what, f"{want} each", "\n".join(wrong))
        what = "recorded load of each physical expert is the tokens that it was given"
        if self.served is None:
            self._skip(check, what, "the real kernels do not tell")
            return
        differ = (loads != self.served).nonzero().tolist()
        lines = [
            f"MoE layer {i}, physical {p}: recorded {loads[i][p]}, given {self.served[i][p]}"
            for i, p in differ[:8]
        ]
        figure = f"{loads.numel() - len(differ)} of {loads.numel()} equal"
        self._check(check, not differ, what, figure, "\n".join(lines))

    def _per_rank(self, loads: Any) -> list[list[int]]:
        found: list[list[int]] = loads.reshape(len(loads), self.ranks.size, -1).sum(2).tolist()
        return found

    def _round(
        self, model: Any, config: Any, balancer: Balancer, number: int
    ) -> tuple[bool, tuple[float, float]]:
        """Forward passes over one skewed batch until EplbState rearranges, then one more."""
        changed = False
        before = None
        for _ in range(2 * build.STEPS):
            _, recorded = self._run(model, config, balancer, number, keep=True)
            before, _ = self._loads(recorded)
            changed = self._step(balancer, config)
            if changed:
                break
        _, recorded = self._run(model, config, balancer, number)
        after, _ = self._loads(recorded)
        loads = [self._per_rank(before), self._per_rank(after)]
        if changed and self.ranks.rank == 0:
            self.out.send("loads", batch=number, before=loads[0], after=loads[1])
        return changed, (checks.balancedness(loads[0]), checks.balancedness(loads[1]))

    def _slots_now(self, model: Any, balancer: Balancer) -> None:
        table = balancer.physical_to_logical.cpu().tolist()
        layers = dict(zip(sorted(self.expected), table, strict=False))
        modules = {number: module for number, _, module in slots.expert_modules(model)}
        kept = {n: wna16.kept(modules[n], held) for n, held in self.expected.items()}
        judged = slots.judge(model, kept, self.ranks.rank, layers)
        everywhere = [s for part in self.ranks.gather(judged) for s in part]
        self._slots("5 rearrangement", "after rearrangements", everywhere)

    def _balancedness(self, ratios: list[tuple[float, float]]) -> None:
        figure = "; ".join(f"{a:.3f} -> {b:.3f}" for a, b in ratios)
        # Replicas are chosen per token, not dealt: a perfect balance may lose a little.
        passed = all(b >= min(a, 0.9) - 0.05 for a, b in ratios)
        what = "balancedness (mean over max tokens per rank) on skewed routing, before -> after"
        self._check("6 load", passed, what, figure)

    def _metadata(self, model: Any, moe: Any) -> None:
        what = "update_physical_experts_metadata reaches every MoE layer"
        if not hasattr(moe, "update_physical_experts_metadata"):
            self._skip("8 errors", what, "this release has no such member")
            return
        problems = self.ranks.gather(checks.metadata_reaches_all(model, moe))
        detail = "\n".join(f"rank {r}: {p}" for r, found in enumerate(problems) for p in found)
        layers = len(slots.expert_modules(model))
        self._check("8 errors", not detail, what, f"{layers} MoE layers", detail)

    def _errors(self) -> None:
        """Refusals that must be told clearly."""
        which, ep = self.case["subject"], self.ranks.size
        self.at = self._checkpoint(self.job["experts"])
        experts = int(self.family.text(checkpoint.read_config(self.at))[self.family.experts])
        redundant = next(r for r in range(1, ep + 1) if (experts + r) % ep)
        fits = next(r for r in range(redundant, redundant + ep + 1) if not (experts + r) % ep)
        _, model, error = self._build(which, self.at, redundant)
        what = f"E = {experts}, R = {redundant}, ep = {ep}: not divisible, must be refused"
        named = all(re.search(rf"\b{n}\b", error) for n in (experts, redundant, ep, fits))
        if which == "upstream":
            told = re.search(r"even|divis", error) is not None
            self._check("8 errors", told, what, detail=error or "the model was built")
        else:
            right = "ValueError" in error and named
            ask = f"a ValueError that names {experts}, {redundant}, {ep}, and {fits}, the next R"
            self._check("8 errors", right, what, detail=f"{error or 'built'}\nwanted: {ask}")
        del model
        self._without_moe(which)

    def _without_moe(self, which: str) -> None:
        if not self.family.all_dense:
            return
        folder = self._checkpoint(self.job["experts"], "-dense", dense=True)
        _, model, error = self._build(which, folder, 0)
        what = "a model (stage) without MoE layers is told apart"
        layers = getattr(model, "num_moe_layers", 0) if model is not None else None
        passed = layers == 0 or (bool(error) and "moe" in error.lower())
        self._check("8 errors", passed, what, detail=error or f"num_moe_layers is {layers}")


def checks_text(check: str) -> str:
    return {
        "1 protocol": "the release's own test and every member",
        "2 off": "EPLB off against upstream's class",
        "3 slots": "every local slot against the checkpoint",
        "4 logits": "logits with EPLB on against off",
        "5 rearrangement": "rearrangements by the release's own EplbState",
        "6 load": "recorded expert loads and balancedness",
        "7 handed out": "weights that EPLB moves",
        "8 errors": "update_physical_experts_metadata",
    }[check]
