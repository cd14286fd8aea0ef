"""What a rank would find in DeepSpeed's files had the checkpoint been made by as many ranks as there are now: flat partitions
of masters and optimizer state are cut anew, parameter by parameter, and each rank reads its part of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from perdure.training.checkpoint.pack import BLOB_BYTES
from perdure.training.engine.leaves import Decoder
from perdure.training.engine.shards import Place
from perdure.training.errors import CheckpointDamaged, ConfigError

_GAP = BLOB_BYTES // 4
"""Elements that are read along rather than that a blob is decoded twice."""
_RANK = "zero_pp_rank_"
"""Before the number of a rank, in names of the files that each has of its own."""


class Ref(NamedTuple):
    """In the place of a tensor: the path of its leaf."""

    path: str


Decode = Callable[[str], Any]  # Any: what DeepSpeed would have read
"""Of a file by its name, with a `Ref` for each tensor."""


class _Span(NamedTuple):
    """Elements of a parameter that lie side by side in a flat tensor: where they begin there, and in the parameter."""

    name: str
    start: int
    first: int
    length: int


class _Copy(NamedTuple):
    path: str
    start: int
    to: int
    length: int


class _Flat(NamedTuple):
    """A flat tensor of a group of parameters, as this rank has it now."""

    names: tuple[str, ...]
    spans: list[_Span]
    size: int


_Source = tuple[int, Any]  # Any: a number or a name
"""A rank of the checkpoint's, and which of its flat tensors."""
_Pieces = Mapping[str, list[tuple[_Source, _Span]]]
"""Of each parameter: where the checkpoint has its elements."""


class OtherRanks:
    """The files of a checkpoint of `ranks` ranks, for this rank of now."""

    def __init__(self, engine: Any, decoder: Decoder, decode: Decode, ranks: int) -> None:  # Any: a DeepSpeedEngine
        assert decoder.read_part is not None
        assert decoder.shape_of is not None
        self._read_part, self._shape_of = decoder.read_part, decoder.shape_of
        self._engine, self._decoder, self._decode, self._ranks = engine, decoder, decode, ranks
        self._now, self._rank = int(engine.seq_dp_world_size), int(engine.global_rank)
        self._stage = int(engine.zero_optimization_stage())
        self._shapes: list[dict[str, torch.Size]] = []
        """Of ZeRO 3's sub-groups. DeepSpeed reads the file they are in first."""

    def file(self, name: str) -> Any:  # Any: as DeepSpeed has it
        """Raises ConfigError for state of which nothing says how it is cut, CheckpointDamaged where a piece is missing."""
        names = [name.replace(f"{_RANK}{self._rank}_", f"{_RANK}{rank}_") for rank in range(self._ranks)]
        state = self._decode(names[0])
        if "dp_world_size" in state:
            self._check_order(state["ds_config"])
            state |= {"dp_world_size": self._now}
            self._shapes = state["param_shapes"]
            if self._stage == 3 and state.get("frozen_param_shapes"):
                frozen = [self._decode(one)["frozen_param_fragments"] for one in names]
                self._leave_out(frozen[self._rank : self._rank + 1])
                state |= {"frozen_param_fragments": self._frozen(state["frozen_param_shapes"], frozen)}
        else:
            every = [self._decode(one)["optimizer_state_dict"] for one in names]
            self._leave_out(every[self._rank : self._rank + 1])
            state |= {"optimizer_state_dict": self._optimizer(every)}
        return self._read(state)

    def _check_order(self, config: Any) -> None:  # Any: JSON values, or the path of a file of them
        """Raises ConfigError where parameters lie in another order than DeepSpeed says."""
        stored = config.get("zero_optimization", {}) if isinstance(config, dict) else {}
        if self._stage in (1, 2) and (self._engine.zero_round_robin_gradients() or stored.get("round_robin_gradients")):
            raise ConfigError(
                "DeepSpeed's round_robin_gradients = true: nothing says where parameters lie in the partitions of other ranks",
                "resume on as many ranks as before",
            )

    def _read(self, state: Any) -> Any:  # Any: as DeepSpeed has it
        if isinstance(state, Ref):
            return self._decoder.read(state.path).tensor(state.path)
        if isinstance(state, dict):
            return type(state)((key, self._read(value)) for key, value in state.items())
        return [self._read(value) for value in state] if type(state) is list else state

    def _leave_out(self, state: Any) -> None:  # Any: as DeepSpeed has it
        """What is to have these names now is cut anew, perhaps without any of them: it is not to be compared with them."""
        if isinstance(state, Ref):
            self._shape_of(state.path)
        elif isinstance(state, (dict, list)):
            for value in state.values() if isinstance(state, dict) else state:
                self._leave_out(value)

    def _frozen(self, shapes: Mapping[str, torch.Size], every: list[Mapping[str, Ref]]) -> dict[str, torch.Tensor]:
        found = {}
        for name, shape in shapes.items():
            sizes = {name: shape.numel()}
            pieces = _by_name(((rank, name), slices(sizes, self._ranks, rank)) for rank in range(self._ranks))
            spans = slices(sizes, self._now, self._rank)
            refs = {(rank, name): one[name] for rank, one in enumerate(every)}
            found[name] = self._vector(spans, -(-shape.numel() // self._now), pieces, refs)
        return found

    # masters and the optimizer's state

    def _optimizer(self, every: list[dict[str, Any]]) -> dict[str, Any]:
        masters_key, state_key = (
            ("fp32_flat_groups", "optimizer_state_dict")
            if self._stage == 3
            else ("single_partition_of_fp32_groups", "base_optimizer_state")
        )
        inner = [one[state_key] for one in every]
        if not isinstance(inner[0], dict):
            raise ConfigError("DeepSpeed's elastic_checkpoint = true keeps no state that could be cut anew", "leave it out")
        pieces = _by_name(self._stored(every))
        masters, states = [], {}
        for number, flat in enumerate(self._flats()):
            sources = sorted({source for name in flat.names for source, _ in pieces[name]})
            refs = {(rank, which): every[rank][masters_key][which] for rank, which in sources}
            masters.append(self._vector(flat.spans, flat.size, pieces, refs))
            sizes = {(rank, which): self._size(refs[rank, which]) + _padding(every[rank], which) for rank, which in sources}
            kept = {(rank, which): inner[rank]["state"].get(which, {}) for rank, which in sources}
            states[number] = {
                key: self._value(key, {source: one[key] for source, one in kept.items()}, sizes, flat, pieces)
                for key in kept[sources[0]]
            }
        of = getattr(self._engine.optimizer, "sub_group_to_group_id", {number: number for number in states})
        groups = [
            {**group, "params": [number for number in states if of[number] == which]}
            for which, group in enumerate(inner[0]["param_groups"])
        ]
        packed = {**inner[0], "state": {number: one for number, one in states.items() if one}, "param_groups": groups}
        own = every[0] | {state_key: packed, masters_key: masters}
        if "param_alignment_paddings" in own:
            own["param_alignment_paddings"] = self._engine.optimizer.round_robin_bit16_padding
        return own

    def _stored(self, every: list[dict[str, Any]]) -> Iterator[tuple[_Source, list[_Span]]]:
        """What lies where in the checkpoint's flat tensors."""
        if self._stage == 3:
            for which, shapes in enumerate(self._shapes):
                sizes = {name: shape.numel() for name, shape in shapes.items()}
                for rank in range(self._ranks):
                    yield (rank, which), slices(sizes, self._ranks, rank)
            return
        passed: dict[tuple[int, str], int] = {}
        for rank, one in enumerate(every):
            for which, fragments in enumerate(one["param_slice_mappings"]):
                spans = []
                for name, fragment in fragments.items():
                    first = passed.get((which, name), 0)
                    passed[which, name] = first + fragment.numel
                    spans.append(_Span(name, fragment.start, first, fragment.numel))
                yield (rank, which), spans

    def _flats(self) -> Iterator[_Flat]:
        """What is to lie where in this rank's flat tensors."""
        optimizer, name_of = self._engine.optimizer, self._engine.param_names
        if self._stage == 3:
            for group, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
                sizes = {name_of[one]: one.ds_numel for one in group}
                size = sum(-(-count // self._now) for count in sizes.values())
                if size != flat.numel():
                    raise ConfigError("ZeRO 3 cuts among some of the ranks only (MiCS?): it resumes on as many ranks as before")
                yield _Flat(tuple(sizes), slices(sizes, self._now, self._rank), size)
            return
        for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
            held = [(name_of[one], one._hp_mapping) for one in group if one._hp_mapping is not None]
            spans = [
                _Span(name, one.hp_fragment_address.start, one.lp_fragment_address.start, one.lp_fragment_address.numel)
                for name, one in held
            ]
            yield _Flat(tuple(name_of[one] for one in group), spans, flat.numel())

    def _value(
        self, key: str, values: dict[_Source, Any], sizes: dict[_Source, int], flat: _Flat, pieces: _Pieces
    ) -> Any:  # Any: a tensor, or what the optimizer has beside
        shapes = {source: self._shape_of(value.path) for source, value in values.items() if isinstance(value, Ref)}
        if shapes == {source: (size,) for source, size in sizes.items()}:
            return self._vector(flat.spans, flat.size, pieces, values)
        if any(shapes.values()):
            raise ConfigError(f"nothing says how {key!r} of the optimizer is cut among ranks", "resume on as many as before")
        return next(iter(values.values()))

    # reading

    def _size(self, ref: Ref) -> int:
        [size] = self._shape_of(ref.path)
        return size

    def _vector(self, spans: list[_Span], size: int, pieces: _Pieces, refs: Mapping[_Source, Ref]) -> torch.Tensor:
        """A flat tensor of these spans, and zeros between them."""
        copies = [copy for span in spans for copy in _copies(span, pieces[span.name], refs)]
        if sum(copy.length for copy in copies) != sum(span.length for span in spans):
            path = next(iter(refs.values())).path
            raise CheckpointDamaged(f"{path} and those of the other ranks do not make up the parameters", part=path)
        out = torch.zeros(size, dtype=self._part(next(iter(refs.values())).path, 0, 0).dtype)
        for run in _runs(copies):
            begin, end = run[0].start, max(copy.start + copy.length for copy in run)
            part = self._part(run[0].path, begin, end)
            for copy in run:
                out[copy.to : copy.to + copy.length] = part[copy.start - begin : copy.start - begin + copy.length]
        return out

    def _part(self, path: str, begin: int, end: int) -> torch.Tensor:
        shape = self._shape_of(path)
        part = self._read_part(path, shape, Place((begin,), (end - begin,)))
        assert part is not None
        return part.tensor(path)


def _padding(state: Mapping[str, Any], which: int) -> int:
    """Elements at the end of the optimizer's flat tensors that masters are saved without."""
    return int(state["group_paddings"][which]) if "group_paddings" in state else 0


def slices(sizes: Mapping[str, int], ranks: int, rank: int) -> list[_Span]:
    """A rank's part of each of these parameters, one after the other: equal parts, the last one padded."""
    spans, start = [], 0
    for name, size in sizes.items():
        part = -(-size // ranks)
        first = min(rank * part, size)
        spans.append(_Span(name, start, first, min(part, size - first)))
        start += part
    return spans


def _by_name(flats: Iterable[tuple[_Source, Sequence[_Span]]]) -> dict[str, list[tuple[_Source, _Span]]]:
    found: dict[str, list[tuple[_Source, _Span]]] = {}
    for source, spans in flats:
        for span in spans:
            found.setdefault(span.name, []).append((source, span))
    return found


def _copies(span: _Span, pieces: Sequence[tuple[_Source, _Span]], refs: Mapping[_Source, Ref]) -> Iterator[_Copy]:
    for source, piece in pieces:
        first = max(span.first, piece.first)
        count = min(span.first + span.length, piece.first + piece.length) - first
        if count > 0:
            yield _Copy(refs[source].path, piece.start + first - piece.first, span.start + first - span.first, count)


def _runs(copies: Iterable[_Copy]) -> Iterator[list[_Copy]]:
    """Those that are read at once."""
    run: list[_Copy] = []
    end = 0
    for copy in sorted(copies):
        if run and (copy.path != run[0].path or copy.start - end > _GAP):
            yield run
            run = []
        run.append(copy)
        end = copy.start + copy.length
    if run:
        yield run
