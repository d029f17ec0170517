"""Every fault in a folder of real files gets the status that it should, by headers and by decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty import OPTIONS, Fault, make_faulty

from finetrainers.config.geometry import Geometry
from finetrainers.config.root import TrainConfig
from finetrainers.config.sections import DataSection, ModelSection
from finetrainers.data.inspect.item_report import ItemReport
from finetrainers.data.inspect.plan import DatasetPlan
from finetrainers.data.inspect.probe_all import ProbeOptions
from finetrainers.data.inspect.survey import survey_dataset

GEOMETRY = Geometry(temporal=8, spatial=16, patch=1, patch_t=1, fps=8)


def survey(folder: Path, probe: ProbeOptions, **options: object) -> DatasetPlan:
    model = ModelSection(model_name="ltx_video", pretrained_model_name_or_path="x")
    data = DataSection(data_root=folder, **{**OPTIONS, **options})
    return survey_dataset(TrainConfig(model=model, data=data), GEOMETRY, options=probe)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Fault]]:
    made = tmp_path_factory.mktemp("faulty") / "clips"
    return made, make_faulty(made)


def test_headers_tell_most_faults_and_decoding_the_others(folder: tuple[Path, dict[str, Fault]]) -> None:
    root, faults = folder
    assert len(faults) >= 30
    by_header = {v.name: v for v in survey(root, ProbeOptions(duplicates=True)).items}
    assert by_header.keys() == faults.keys()
    assert {n: (v.status, v.marks) for n, v in by_header.items()} == {n: (f.status, f.marks) for n, f in faults.items()}
    for name, fault in faults.items():
        assert fault.reason in (by_header[name].reason or ""), name
        if fault.size is not None:
            assert (by_header[name].height, by_header[name].width) == fault.size, name
    assert by_header["copy of the good clip.mp4"].same_as == "a good clip.mp4"
    assert not any(v.decoded for v in by_header.values())

    full = {v.name: v for v in survey(root, ProbeOptions(duplicates=True, decode=True, jobs=1)).items}
    expected = {n: (f.full or f.status, f.marks + f.full_marks) for n, f in faults.items()}
    assert {n: (v.status, v.marks if v.status == "used" else ()) for n, v in full.items()} == {
        n: (status, marks if status == "used" else ()) for n, (status, marks) in expected.items()
    }
    for name, fault in faults.items():
        assert (fault.full_reason or fault.reason) in (full[name].reason or ""), name
    whole = ("used", "too_short", "no_bucket")
    assert {n for n, v in full.items() if v.decoded} == {n for n, (status, _) in expected.items() if status in whole}

    # Results are stored: a start of training decodes nothing, and does not use files that are known to be damaged.
    assert {v.name: v for v in survey(root, ProbeOptions(duplicates=True)).items} == full


def test_an_item_says_what_is_cut_from_it(folder: tuple[Path, dict[str, Fault]]) -> None:
    root, _ = folder
    items: dict[str, ItemReport] = {v.name: v for v in survey(root, ProbeOptions()).items}
    odd = items["odd size.mkv"]
    assert odd.bucket == (17, 32, 48)
    assert odd.crop == pytest.approx(1 - 48 / (32 * 71 / 45), abs=0.02)  # cut at the sides
    assert items["rotated.mp4"].crop == 0
    assert items["slow.mp4"].fps == 4
    assert items["fast.mp4"].fps == 8
    assert items["pipe.mp4"].examples == 0
    stretched = {v.name: v for v in survey(root, ProbeOptions(), video_reshape_mode="none").items}["odd size.mkv"]
    assert (stretched.crop, stretched.marks) == (0, ("distorted",))
