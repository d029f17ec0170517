"""The check of a dataset: the status of every item, without model weights. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetrainers.config.errors import ConfigError, Problem
from finetrainers.config.geometry import Geometry
from finetrainers.config.load import Source, as_config
from finetrainers.config.root import TrainConfig
from finetrainers.data.inspect.plan import DatasetPlan
from finetrainers.data.inspect.probe_all import ProbeOptions
from finetrainers.data.inspect.report import make_report
from finetrainers.methods.registry import method_spec, plan_work
from finetrainers.utils.process_state import only_thread

from .preflight import preflight
from .rows import store_data

if TYPE_CHECKING:
    from .rows import Rows


def check(
    config: Source,
    *,
    data: Rows | None = None,
    eval_data: Rows | None = None,
    decode: bool = False,
    recall: bool = True,
    jobs: int | None = None,
) -> dict[str, Any]:
    """Report the status of every item of the data: its bucket, or why it cannot be used.

        report = check(load_config("run.toml"))
        print([item["reason"] for item in report["items"] if item["use"] == "rejected"])

    Args:
        config: from `load_config`, or a source that it takes; needs a model's name, and data unless it is given here.
        data, eval_data: rows, as `train` takes them; arrays are stored where a run of `config` uses them.
        decode: decode every file from end to end, not only its header.
        recall: use remembered results of files that were examined before.
        jobs: processes that decode; default: one for each processor.

    Returns:
        The report that `finetrainers check --json` writes: `usable`, `counts`, `buckets`, `items` and more.

    Raises:
        InputError: another thread of this process runs a function of finetrainers.
        ConfigError: something else is wrong with the configuration.
    """
    rows = {name: value for name, value in (("data", data), ("eval_data", eval_data)) if value is not None}
    with only_thread():
        config, _ = store_data(as_config(config), rows)
        report, problems = examine(config, ProbeOptions(decode=decode, duplicates=True, recall=recall, jobs=jobs))
    if report is None or problems:
        raise ConfigError(problems)
    return report


def examine(config: TrainConfig, options: ProbeOptions) -> tuple[dict[str, Any] | None, list[Problem]]:
    """Return the report and the other problems of the configuration.

    The report is None if the configuration leaves nothing to check.
    """
    survey: DatasetPlan | None = None

    resolved = config

    def planner(config: TrainConfig, geometry: Geometry, *, sizes_are_wrong: bool) -> Any:
        nonlocal survey, resolved
        resolved = config
        if sizes_are_wrong or not config.data.is_named:
            return plan_work(config, geometry, sizes_are_wrong=sizes_are_wrong)
        survey = method_spec(config).survey(config, geometry, options)
        return survey.checked()

    problems: list[Problem] = []
    try:
        preflight(config, planner=planner)
    except ConfigError as error:
        # Nothing is written to the run's directory; and the survey has the problems of items.
        excluded = (
            "--output_dir",
            "--resume_from_checkpoint",
            "--report_to",
            *(("data",) if survey is not None else ()),
        )
        problems = [problem for problem in error.problems if problem.where not in excluded]
    if survey is None:
        message = "no clips to check: give --data_root or --dataset_file"
        return None, problems or [Problem("--data_root", message, "required")]
    return make_report(survey, resolved, decoded=options.decode), problems
