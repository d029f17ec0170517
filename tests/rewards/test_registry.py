"""How a reward is named: the text of an entry, the registry, and problems of either, found before anything loads."""

from __future__ import annotations

import inspect
import operator
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, Literal

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from refusals import refused
from torch import Tensor

from finetrainers.config.rewards import Reward as Entry
from finetrainers.config.rewards import RewardEntry, parse_reward
from finetrainers.rewards import registry
from finetrainers.rewards.base import Head, Reward
from finetrainers.rewards.registry import (
    absent_gpu,
    columns_taken,
    make_reward,
    register_reward,
    resolve_reward,
    reward_names,
    reward_problems,
)
from finetrainers.rewards.reward_set import RewardSet
from finetrainers.rewards.served import ServedReward
from finetrainers.utils.failures import Kind, error_kind


class Mine(Reward):
    """Takes options of several types, one of them without a default."""

    heads: ClassVar[Mapping[str, Head]] = {"one": Head(), "two": Head(mean=1.0, std=2.0)}

    def __init__(
        self,
        *,
        path: str,
        scale: float = 1.0,
        frames: int = 4,
        flip: bool = False,
        limit: float | None = None,
        dtype: Literal["fp32", "bf16"] = "fp32",
    ) -> None:
        self.options = (path, scale, frames, flip, limit, dtype)

    def score(self, videos: Tensor, prompts: Sequence[str], *, fps: float) -> Mapping[str, Tensor]:
        return {head: torch.zeros(len(prompts)) for head in self.heads}


def red(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    """How red clips are."""
    return videos[:, :, 0].mean((1, 2, 3))


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it, and `mine` is a module that can be imported."""
    monkeypatch.setattr(registry.REWARDS, "registered", dict(registry.REWARDS.registered))
    module = ModuleType("mine")
    module.Mine, module.red, module.number = Mine, red, 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", module)


def entry(value: Any) -> RewardEntry:
    return TypeAdapter(Entry).validate_python(value)


def problems(text: str) -> list[tuple[Kind, str]]:
    """Return the kind and the message of each problem of an entry."""
    return [(error_kind(error), str(error)) for error in reward_problems(entry(text))]


# ---- the text of an entry ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("brightness", {}),
        ("brightness=0.5", {"weight": 0.5}),
        ("brightness=-1e-2", {"weight": -0.01}),
        (
            "brightness=0,every=5,batch_size=2,mean=0.5,std=2",
            {"weight": 0, "every": 5, "batch_size": 2, "mean": 0.5, "std": 2},
        ),
        ("color,target=#ff0000", {"options": {"target": "#ff0000"}}),
        ("x=2,path=/a=b/c d", {"weight": 2, "options": {"path": "/a=b/c d"}}),
        ("  x=2, path=p, mean=1 ", {"weight": 2, "mean": 1, "options": {"path": "p"}}),
        ("x,path=", {"options": {"path": ""}}),
    ],
)
def test_text_becomes_fields(text: str, expected: dict[str, Any]) -> None:
    found = entry(text)
    name = text.strip().partition("=")[0].partition(",")[0]
    defaults = {"weight": 1.0, "mean": None, "std": None, "every": 1, "batch_size": None, "options": {}}
    assert found.model_dump() == {"name": name, **defaults, **expected}


@pytest.mark.parametrize(
    ("name", "reward", "head"),
    [
        ("brightness", "brightness", None),
        ("videoalign.vq", "videoalign", "vq"),
        ("package.module:red", "package.module:red", None),
        ("package.module:Mine.two", "package.module:Mine", "two"),
    ],
)
def test_a_name_may_name_a_head(name: str, reward: str, head: str | None) -> None:
    assert (entry(name).reward, entry(name).head) == (reward, head)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000", "https://a.b/rewards/x", "http://a.b:1#vq"])
def test_servers_are_names_too(url: str) -> None:
    found = entry(f"{url}=0.5,timeout=5")
    assert (found.name, found.weight, found.options) == (url, 0.5, {"timeout": "5"})
    assert (found.reward, found.head) == (url, None)
    assert issubclass(resolve_reward(found.reward), ServedReward)
    assert reward_problems(found) == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "expected NAME"),
        ("=0.5", "expected NAME"),
        ("two words", "expected NAME"),
        ("brightness,target", "'target'"),
        ("brightness,=3", "'=3'"),
        ("brightness,", "option=value"),
        ("x,path=a,path=b", "path"),
        ("x,mean=1,mean=2", "mean"),
        ("brightness=", "weight"),
        ("brightness=much", "weight"),
        ("brightness=nan", "weight"),
        ("brightness,std=0", "std"),
        ("brightness,every=0", "every"),
        ("brightness,batch_size=0", "batch_size"),
        ({"name": "brightness", "wait": 1}, "wait"),
        ({}, "name"),
    ],
)
def test_other_text_is_refused(value: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        entry(value)


def test_tables_are_entries() -> None:
    table = {"name": "color", "weight": 0.5, "options": {"target": "red"}}
    assert entry(table) == entry("color=0.5,target=red")


# ---- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", reward_names())
def test_every_registered_name_is_a_reward(name: str) -> None:
    """Registered rewards are importable, documented, and take options as text.

    A reward without weights has no required option.
    """
    cls = resolve_reward(name)
    assert issubclass(cls, Reward)
    assert not inspect.isabstract(cls)
    assert (cls.__doc__ or "").strip()
    assert cls.heads
    assert len(cls.heads) > 1 or list(cls.heads) == ["score"]
    for parameter in inspect.signature(cls).parameters.values():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, parameter
        assert parameter.annotation is not inspect.Parameter.empty, parameter


def test_the_names_are_as_documented() -> None:
    assert set(reward_names()) == {
        "brightness", "contrast", "saturation", "color", "sharpness", "compressibility", "incompressibility",
        "motion", "smoothness", "steadiness", "preferred_color", "preferred_color_shown",
        "clipscore", "pickscore", "hpsv2", "aesthetic", "hpsv3", "videoalign",
        "demo",
    }  # fmt: skip


def test_functions_classes_and_addresses_can_be_registered() -> None:
    register_reward("red", red)
    register_reward("mine", Mine)
    register_reward("address", "mine:Mine")

    @register_reward("decorated")
    def blue(videos: Tensor, prompts: Sequence[str]) -> Tensor:
        return videos[:, :, 2].mean((1, 2, 3))

    assert {"red", "mine", "address", "decorated"} <= set(reward_names())
    assert resolve_reward("mine") is Mine
    assert resolve_reward("address") is Mine
    videos = torch.rand(3, 2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert make_reward("red", {}).score(videos, [""] * 3, fps=8.0)["score"].equal(red(videos, []))
    assert make_reward("decorated", {}).score(videos, [""] * 3, fps=8.0)["score"].equal(blue(videos, []))
    assert resolve_reward("red").__doc__ == red.__doc__


def test_modules_need_no_registration() -> None:
    assert resolve_reward("mine:Mine") is Mine
    assert list(resolve_reward("mine:red").heads) == ["score"]


@pytest.mark.parametrize("name", ["", "a.b", "a:b", "a=b", "a,b", "a b"])
def test_names_that_cannot_be_told_apart_are_refused(name: str) -> None:
    with refused("invalid", repr(name)):
        register_reward(name, red)


@pytest.mark.parametrize("scorer", [42, object()])
def test_what_cannot_be_called_is_refused_at_once(scorer: Any) -> None:
    with refused("invalid", "'odd'"):
        register_reward("odd", scorer)


def test_taken_names_are_refused_and_the_same_function_replaces_itself() -> None:
    with refused("duplicate", "'brightness'"):
        register_reward("brightness", red)
    for _ in range(2):

        @register_reward("cell")
        def cell(videos: Tensor, prompts: Sequence[str]) -> Tensor:
            return videos[:, :, 1].mean((1, 2, 3))

    with refused("duplicate", "'cell'"):
        register_reward("cell", operator.attrgetter("ndim"))


def few(videos: Tensor) -> Tensor:
    return videos.mean((1, 2, 3, 4))


def only(videos: Tensor, prompts: Sequence[str], answer: list[str], /) -> Tensor:
    return videos.mean((1, 2, 3, 4))


async def graded(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    return red(videos, prompts)


graded.differentiable = True  # type: ignore[attr-defined]


def ranked(videos: Tensor, prompts: Sequence[str]) -> Tensor:
    return red(videos, prompts)


ranked.scope = "prompt"  # type: ignore[attr-defined]


class Hasty(Reward):
    def score(self, videos: Tensor, prompts: Sequence[str]) -> Mapping[str, Tensor]:  # type: ignore[override]
        return {"score": red(videos, prompts)}


class Unfinished(Reward):
    heads = {"score": Head()}  # noqa: RUF012


@pytest.mark.parametrize(
    ("scorer", "kind"),
    [
        (graded, "unsupported"), (few, "mismatch"), (only, "mismatch"), (ranked, "unknown"), (Hasty, "mismatch"),
        (Unfinished, "required"), ("math:pi", "invalid"),
    ],
)  # fmt: skip
def test_rewards_of_the_wrong_kind_are_refused_without_being_called(scorer: Any, kind: Kind) -> None:
    register_reward("odd", scorer)
    assert [error_kind(error) for error in reward_problems(RewardEntry(name="odd"))] == [kind]


def rated(videos: Tensor, prompts: Sequence[str], fps: float, *, answer: list[str], hint: Any = None) -> Tensor:
    return videos.mean((1, 2, 3, 4)) * fps


def curious(clips: Tensor, texts: Sequence[str], **columns: Any) -> Tensor:
    return clips.mean((1, 2, 3, 4))


class Examiner(Reward):
    async def score(  # type: ignore[override]
        self, videos: Tensor, prompts: Sequence[str], *, fps: float, answer: list[str]
    ) -> Mapping[str, Any]:
        return {"score": [float(len(text)) for text in answer]}


def test_keywords_of_a_reward_are_columns_of_the_prompts() -> None:
    rows = [
        {"answer": "two", "hint": "?", "clips": 1, "fps": 2},
        {"answer": "three", "hint": None, "clips": 1, "fps": 2},
    ]
    expected = {rated: ["answer", "hint"], curious: ["answer", "hint"], red: [], Examiner: ["answer"]}
    for scorer, names in expected.items():
        register_reward(scorer.__name__.lower() + "_", scorer)
        reward = RewardEntry(name=scorer.__name__.lower() + "_")
        assert reward_problems(reward) == []
        columns = columns_taken(reward)
        assert list(columns.select(rows)) == names, scorer
        assert columns.required == (() if scorer in (curious, red) else ("answer",))
    assert columns.select(rows) == {"answer": ["two", "three"]}
    with pytest.raises(KeyError):
        columns.select([{"hint": 1}])
    assert columns_taken(RewardEntry(name="http://localhost:1")).takes_all
    assert columns_taken(RewardEntry(name="brightness")).select(rows) == {}


def test_options_may_be_numbers_and_their_values_are_checked() -> None:
    entry = RewardEntry.model_validate({"name": "http://localhost:1", "options": {"retries": 2, "timeout": 1.5}})
    assert entry.options == {"retries": "2", "timeout": "1.5"}
    assert not reward_problems(entry)
    assert reward_problems(RewardEntry(name="color", options={"target": "octarine"}))
    assert reward_problems(RewardEntry(name="clipscore", options={"device": "gpu"}))
    assert not reward_problems(RewardEntry(name="color", options={"target": "teal"}))


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("brightnes", "unknown", "'brightness'"),
        ("nowhere:red", "not_installed", "'nowhere'"),
        ("mine:blue", "unknown", "'blue'"),
        ("mine:number", "invalid", " int"),
        ("http://", "invalid", "http://localhost:8000"),
    ],
)
def test_names_of_nothing_are_refused(name: str, kind: Kind, value: str) -> None:
    with refused(kind, repr(name), value) as caught:
        resolve_reward(name)
    assert problems(name) == [(kind, str(caught.value))]


# ---- heads and options ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("brightness", []),
        ("brightness.score", []),
        ("demo.color", []),
        ("mine:Mine.two,path=p,scale=2,frames=3,limit=1.5", []),
        ("brightness.light", ["brightness", "'light'", "score"]),
        ("demo.colr", ["demo", "'colr'", "'color'"]),
        ("color,tarket=red", ["color", "'tarket'", "'target'"]),
        ("brightness,target=red", ["brightness", "'target'"]),
    ],
)
def test_entries_are_checked(text: str, expected: list[str]) -> None:
    """An unknown head or option is named with the nearest or the valid ones."""
    errors = problems(text)
    assert [kind for kind, _ in errors] == ["unknown"] * bool(expected)
    for _, message in errors:
        assert [value for value in expected if value not in message] == []
        assert not message.endswith("valid: ")


@pytest.mark.parametrize("name", ["demo", "mine:Mine"])
def test_one_of_several_heads_must_be_named_as_the_message_says(name: str) -> None:
    """Who follows the advice gets no other complaint."""
    [message] = [text for kind, text in problems(f"{name},path=p" if ":" in name else name) if kind == "required"]
    for advised in message.rpartition(": ")[2].split(", "):
        assert problems(f"{advised},path=p" if ":" in name else advised) == [], advised


def test_a_missing_option_is_said_with_what_to_type() -> None:
    register_reward("mine", Mine)
    [(kind, message)] = problems("mine.one")
    assert kind == "required"
    assert message.endswith("--reward mine.one,path=...")


@pytest.mark.parametrize(
    ("option", "text"), [("scale", "big"), ("frames", "1.5"), ("flip", "perhaps"), ("dtype", "fp64"), ("limit", "x")]
)
def test_values_of_another_type_are_refused_before_anything_loads(option: str, text: str) -> None:
    register_reward("mine", Mine)
    kind: Kind = "unknown" if option == "dtype" else "invalid"
    [problem] = problems(f"mine.one,path=p,{option}={text}")
    assert problem[0] == kind
    assert f"{option}={text!r}" in problem[1]
    with refused(kind, f"{option}={text!r}"):
        make_reward("mine", {"path": "p", option: text})


def test_text_becomes_the_types_of_the_options() -> None:
    made = make_reward(
        "mine:Mine", {"path": "7", "scale": "2", "frames": "3", "flip": "true", "limit": "0.5", "dtype": "bf16"}
    )
    assert isinstance(made, Mine)
    assert made.options == ("7", 2.0, 3, True, 0.5, "bf16")
    assert [type(value) for value in made.options] == [str, float, int, bool, float, str]
    defaults = make_reward("mine:Mine", {"path": "p"})
    assert isinstance(defaults, Mine)
    assert defaults.options == ("p", 1.0, 4, False, None, "fp32")


def test_rewards_without_options_are_made() -> None:
    made = make_reward("brightness", {})
    assert float(made.score(torch.ones(1, 2, 3, 4, 4), [""], fps=8.0)["score"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "kind", "value"), [({}, "required", "path"), ({"path": "p", "scales": "2"}, "unknown", "'scale'")]
)
def test_missing_and_unknown_options_are_refused(options: dict[str, str], kind: Kind, value: str) -> None:
    with refused(kind, "mine:Mine", value):
        make_reward("mine:Mine", options)


def test_heads_are_brought_to_a_common_scale() -> None:
    assert Mine.heads["two"].normalize(torch.tensor([1.0, 5.0])).tolist() == [0.0, 2.0]


def test_names_need_no_torch() -> None:
    program = (
        "import sys\n"
        "import finetrainers.rewards.registry as r, finetrainers.config.rewards as c\n"
        "assert r.reward_names() and c.parse_reward('brightness=1')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("option", ["path", "base"])
def test_weights_that_are_nowhere_are_found_before_anything_is_loaded(option: str) -> None:
    [(kind, message)] = problems(f"videoalign.vq=1,{option}=/nowhere/weights")
    assert kind == "not_found"
    assert message.startswith(f"videoalign.vq: {option}='/nowhere/weights': ")
    assert problems(f"videoalign.vq=1,{option}=somebody/weights") == []


@pytest.mark.parametrize(
    ("before", "now"), [("colour", "color"), ("taste", "preferred_color"), ("taste_shown", "preferred_color_shown")]
)
def test_an_earlier_name_means_the_reward_of_today(before: str, now: str) -> None:
    assert resolve_reward(before).__doc__ == resolve_reward(now).__doc__
    assert before not in reward_names()


def test_an_earlier_name_of_a_head_means_the_head_of_today() -> None:
    [before, now] = (RewardEntry(**parse_reward(name)) for name in ("demo.colour", "demo.color"))
    assert reward_problems(before) == []
    videos, prompts = torch.rand(1, 2, 3, 32, 64), ["a red star"]
    [old] = RewardSet([before]).score(videos, prompts, fps=8.0).heads.values()
    [new] = RewardSet([now]).score(videos, prompts, fps=8.0).heads.values()
    assert torch.equal(old.raw, new.raw)
    assert reward_problems(RewardEntry(**parse_reward("videoalign.colour")))


def test_a_gpu_that_this_machine_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    found = {
        device: absent_gpu(RewardEntry(name="clipscore", options={"device": device}))
        for device in ("auto", "cpu", "cuda", "cuda:1", "cuda:2")
    }
    assert {device: name for device, name in found.items() if name} == {"cuda:2": "cuda:2"}
    assert absent_gpu(RewardEntry(name="brightness")) is None
