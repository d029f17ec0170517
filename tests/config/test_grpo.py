"""The options of reward finetuning: defaults, forms of values, round trips, and the sums that follow from them."""

import json
import sys
from pathlib import Path

import jsonschema
import pytest
from refusals import refused_options

from finetrainers.config.document import configuration_page, json_schema
from finetrainers.config.flags import parse_flags
from finetrainers.config.grpo import GRPOSection, kernel, step_range, trained_steps
from finetrainers.config.load import dump_toml, load_config
from finetrainers.config.rewards import RewardEntry
from finetrainers.config.root import by_current_names

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BASE = {"model_name": "m", "pretrained_model_name_or_path": "repo", "method": "grpo"}
FLAGS = ["--model_name", "m", "--pretrained_model_name_or_path", "repo", "--method", "grpo"]


def test_flags_become_values():
    config, _ = parse_flags(
        [*FLAGS, "--prompts", "p.txt", "--reward", "brightness=0.5,every=2", "videoalign.vq,path=/ckpt",
            "--rollout_size",
         "49x512x768", "--window_range", "0.25", "0.75", "--old_policy_decay", "75:0.0075:0.999",
         "--no-init_same_noise"]
    )  # fmt: skip
    section = config.grpo
    assert section.reward == [
        RewardEntry(name="brightness", weight=0.5, every=2),
        RewardEntry(name="videoalign.vq", options={"path": "/ckpt"}),
    ]
    assert section.rollout_size == (49, 512, 768)
    assert section.window_range == [0.25, 0.75]
    assert section.old_policy_decay == [75.0, 0.0075, 0.999]
    assert section.init_same_noise is False


@pytest.mark.parametrize("value", ["0.1:0.6", ["0.1:0.6"], [0.1, 0.6], ["0.1", "0.6"], (0.1, 0.6)])
def test_rows_of_numbers_have_several_forms(value):
    assert load_config(**BASE, window_range=value).grpo.window_range == [0.1, 0.6]


@pytest.mark.parametrize(
    ("options", "kind", "value"),
    [
        ({"window_range": [0.1]}, "invalid", "got 0.1;"),
        ({"window_range": "0.1:0.2:0.3"}, "invalid", "at most 2 "),
        ({"window_range": [0.1, 1.2]}, "invalid", "at most 1,"),
        ({"window_range": ["a", "b"]}, "invalid", "'a'"),
        ({"old_policy_decay": "0:1"}, "invalid", "at least 3 "),
        ({"rollout_size": "49x512"}, "invalid", "FRAMESxHEIGHTxWIDTH"),
        ({"reward": "brightness"}, "invalid", '["..."]'),
        ({"reward": ["two words"]}, "invalid", "NAME[=WEIGHT]"),
        ({"reward": ["brightness=1,path=a,path=b"]}, "duplicate", " path "),
        ({"reward": ["brightness=nan"]}, "invalid", "finite"),
        ({"sampler": "dence"}, "unknown", "'dance'?"),
        ({"advantage": "group"}, "unknown", "'group_std'?"),
        ({"sampling_steps": 1}, "invalid", "at least 2,"),
        ({"timestep_fraction": 0}, "invalid", "above 0,"),
        ({"rollout_cfg": 0.5}, "invalid", "at least 1,"),
    ],
)
def test_wrong_values_are_named(options, kind, value):
    with refused_options((next(iter(options)), kind)) as error:
        load_config(**BASE, **options)
    assert value in str(error.value)


#: Entries in all shapes: a comma, a blank at the end, or a name of ours among a reward's own options fit in no text.
ENTRIES = [
    "brightness",
    "color=-0.25,target=#ff0000",
    "http://127.0.0.1:8000#vq=0.5,timeout=3",
    "package.module:red=2,path=/a=b/c d",
    "x=1e-7,mean=0,std=2.5,every=3,batch_size=4,path=p",
    {"name": "a", "options": {"list": "1,2"}},
    {"name": "b", "options": {"text": "ends with a blank "}},
    {"name": "c", "weight": 0.1, "mean": 1.0, "options": {"std": "of the reward itself"}},
]


def test_everything_survives_the_file(tmp_path):
    config = load_config(
        **BASE, prompts="p.txt", reward=ENTRIES, eval_reward=["motion=0"], eval_prompts="e.txt",
        rollout_size="49x512x768",
        window_range=[0.1, 0.7], old_policy_decay=[75, 0.0075, 0.999], best_of_n=4,
        clip_range=1e-5, sampler="cps", shift=3.0,
        init_same_noise=False, train_steps=4,
    )  # fmt: skip
    text = dump_toml(config)
    (tmp_path / "config.toml").write_text(text)
    assert load_config(tmp_path / "config.toml").flat() == config.flat()
    written = tomllib.loads(text)
    assert written["grpo"]["reward"][:3] == [
        "brightness=1.0",
        "color=-0.25,target=#ff0000",
        "http://127.0.0.1:8000#vq=0.5,timeout=3",
    ]
    assert [type(entry) for entry in written["grpo"]["reward"]] == [str] * 5 + [dict] * 3
    assert written["grpo"]["rollout_size"] == "49x512x768"
    jsonschema.validate(written, json.loads(json.dumps(json_schema())))


def test_flags_win_over_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[grpo]\nreward = ["brightness"]\nnum_generations = 4\n')
    config, _ = parse_flags([*FLAGS, "--config", str(file), "--reward", "motion=2"])
    assert (config.grpo.reward, config.grpo.num_generations) == ([RewardEntry(name="motion", weight=2)], 4)


def test_the_schema_knows_rewards():
    schema = json.loads(json.dumps(json_schema()))
    jsonschema.validate({"reward": ["brightness=2", {"name": "x", "weight": 0.5}]}, schema)
    for wrong in ({"reward": [3]}, {"reward": [{"title": "x"}]}, {"rollout_size": "49x512"}, {"window_range": [0, 2]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


def test_the_page_names_kinds():
    page = configuration_page()
    for row in (
        "| `reward` | reward list | none |",
        "| `rollout_size` | size | none |",
        "| `window_range` | number list | `0.0 0.5` |",
        "| `old_policy_decay` | number list | `0.0 0.001 0.5` |",
        "| `prompts` | path | none |",
        "| `video_resolution_buckets` | size list | none |",
        "| `target_modules` | text list |",
    ):
        assert row in page


def section(**options):
    return GRPOSection(**options)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"sampling_steps": 16}, range(8)),
        ({"sampling_steps": 25}, range(13)),  # 12.5 rounded up
        ({"sampling_steps": 25, "window_range": [0.0, 1.0]}, range(24)),  # the last is never trained
        ({"sampling_steps": 10, "window_range": [0.3, 0.7]}, range(3, 7)),
        ({"sampling_steps": 100, "window_range": [0.0, 0.29]}, range(29)),  # 0.29 * 100 is 28.999999999999996
        ({"sampling_steps": 16, "window_size": 0, "window_range": [0.0, 0.1]}, range(15)),
        ({"sampling_steps": 2}, range(1)),
        ({"sampling_steps": 16, "window_range": [0.99, 1.0]}, range(0)),
    ],
)
def test_which_steps_a_window_may_hold(options, steps):
    assert list(step_range(section(**options))) == list(steps)


@pytest.mark.parametrize(
    ("steps", "size", "fraction", "trained"),
    [
        (16, 0, 0.6, 9),  # DanceGRPO's recipe: int(15 * 0.6)
        (12, 0, 0.5, 5),  # not 6: the last step is left out, and 5.5 is rounded down
        (16, 2, 1.0, 2),
        (16, 2, 0.3, 0),
        (101, 0, 0.29, 29),
    ],
)
def test_how_many_steps_are_trained(steps, size, fraction, trained):
    assert trained_steps(section(sampling_steps=steps, window_size=size, timestep_fraction=fraction)) == trained


def test_the_sampler_follows_from_model_and_algorithm():
    assert kernel(section(), is_flow=True) == "flow"
    assert kernel(section(), is_flow=False) == "ddim"
    assert kernel(section(sampler="cps"), is_flow=False) == "cps"


def test_gradients_without_replay_were_removed(caplog: pytest.LogCaptureFixture) -> None:
    run = {"model_name": "m", "pretrained_model_name_or_path": "repo", "method": "grpo"}
    load_config(**run, rollout_gradients="replay")  # as every earlier version wrote it
    assert not caplog.records
    load_config(**run, rollout_gradients="retain", resume_from_checkpoint="latest")
    assert "replay" in caplog.text
    with refused_options(("rollout_gradients", "unsupported")) as error:
        load_config(**run, rollout_gradients="reweight")
    assert "--init_same_noise" in str(error.value)


@pytest.mark.parametrize("given", [{"rl_algorithm": "nft"}, {"grpo_preset": "nft"}])
def test_nft_was_an_algorithm_of_grpo(given: dict[str, str], caplog, tmp_path: Path) -> None:
    model = {"model_name": "m", "pretrained_model_name_or_path": "repo"}
    config = load_config(**model, method="grpo", **given)
    assert config.training.method == "nft"
    assert "--method nft" in caplog.text
    file = tmp_path / "config.toml"  # as an earlier version wrote it for a run of any method
    for algorithm, method, now in (("nft", "grpo", "nft"), ("grpo", "grpo", "grpo"), ("grpo", "sft", "sft")):
        file.write_text(f'[training]\nmethod = "{method}"\n[grpo]\nrl_algorithm = "{algorithm}"\n')
        assert load_config(file, **model).training.method == now
    with refused_options(("rl_algorithm", "conflict")):
        load_config(**model, method="sft", rl_algorithm="nft")
    with refused_options(("rl_algorithm", "unknown")) as error:
        load_config(**model, method="grpo", rl_algorithm="ppo")
    assert "'ppo'" in str(error.value)
    checkpoint = {"method": "grpo", "rl_algorithm": "nft", "framepack_window_size": 4}
    assert by_current_names(checkpoint) == {"method": "nft", "rl_algorithm": "nft", "sliding_window_size": 4}
    flags, _ = parse_flags(
        ["--model_name", "m", "--pretrained_model_name_or_path", "r", "--rl_algorithm", "nft", "--method", "grpo"]
    )
    assert flags is not None
    assert flags.training.method == "nft"
