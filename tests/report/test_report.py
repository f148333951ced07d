"""The page holds everything it needs and says what the records say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import altair as alt
import pytest
from report.fake_runs import (
    GAPS,
    STEPS,
    freeze,
    provenance,
    settings,
    small_spec,
    text_records,
    write_competition,
    write_run,
)

import plait
from plait.cost import cost, full_attention_twin
from plait.records import Record, append, read
from plait.report import build_report, charts, palette
from plait.report import format as fmt
from plait.report import runs as data
from plait.report.marks import Look
from plait.report.page import LOOK, render
from plait.report.runs import Condition, load_run, load_runs
from plait.report.strip import layout_text, split_layout
from plait.report.summary import sentences
from plait.report.tables import flatten


class Page(HTMLParser):
    """Tags and attributes, the text of the body without scripts, and the specs of the charts."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.specs: list[dict] = []
        self.feed(html)
        self.text = re.sub(r"\s+", " ", " ".join(self.words).replace(fmt.SPACE, " "))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, text):
        if self.open and self.open[-1] == "script" and self.tags[-1][1].get("class") == "spec":
            self.specs.append(json.loads(text))
        elif not {"script", "style"} & set(self.open):
            self.words.append(text)

    def attributes(self, *names: str) -> list[str]:
        return [attrs[name] or "" for _, attrs in self.tags for name in names if name in attrs]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[list[Path], str]:
    root = tmp_path_factory.mktemp("report")
    paths = write_competition(root / "runs")
    build_report(paths, root / "out" / "report.html")
    return paths, (root / "out" / "report.html").read_text()


def test_the_page_loads_nothing(built):
    _, html = built
    page = Page(html)
    for link in page.attributes("src", "href", "srcset", "data", "action", "poster"):
        assert link.startswith("#"), link
    assert not {tag for tag, _ in page.tags} & {"link", "iframe", "img", "object", "embed", "base"}
    style = html.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style and "@import" not in style
    policy = next(attrs["content"] for _, attrs in page.tags if "http-equiv" in attrs)
    assert policy is not None and policy.startswith("default-src 'none'") and "http" not in policy
    assert len(html.encode()) < 2_500_000


def test_torch_is_not_imported(built, tmp_path):
    code = (
        "import sys; from pathlib import Path; from plait.report import build_report, charts;"
        f"build_report([Path({str(built[0][0])!r})], Path({str(tmp_path / 'page.html')!r}));"
        "sys.exit(' '.join({'torch', 'transformers', 'pandas'} & set(sys.modules)) or 0)"
    )
    paths = [str(Path(plait.__file__ or plait.__path__[0]).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True)
    assert (run.returncode, run.stderr) == (0, b"")


def test_the_specs_are_valid(built):
    _, html = built
    specs = Page(html).specs
    assert len(specs) == 3 * 4 + 1  # loss, accuracy and two gaps of three runs; one model
    assert all(spec["width"] == "container" for spec in specs)
    for spec in specs[::3]:  # one of each kind
        check(spec)


def check(spec: dict) -> None:
    """Against the schema of Vega-Lite; without the data, which would take the time."""
    alt.Chart.from_dict({**spec, "datasets": {}})


def test_the_same_runs_give_the_same_page(built):
    paths, html = built
    assert render(load_runs(paths)) == html


def test_panels_share_their_axes(built):
    paths, _ = built
    runs = load_runs(paths)
    for panels in (charts.loss(runs, LOOK), charts.accuracy(runs, LOOK), charts.scores(runs, condition(64), LOOK)):
        layers = [layer["encoding"] for panel in panels for layer in charts.page_spec(panel, LOOK)["layer"]]
        for channel, field in (("x", "step"), ("y", "value")):
            fields = [layer[channel] for layer in layers if layer.get(channel, {}).get("field") == field]
            assert len({json.dumps(encoding["scale"]) for encoding in fields}) == 1


def test_the_summary_says_what_the_records_say(built):
    paths, html = built
    page = Page(html)
    for path in paths:
        rows = read(path / "records.jsonl")
        run = load_run(path)
        said = sentences(run).replace(fmt.SPACE, " ")
        losses = [row.values["loss"] for row in rows if row.name == "loss"]
        assert f"ends at {losses[-1]:.4g};" in said
        assert f"the mean of the last {STEPS // 10} recorded is {sum(losses[-60:]) / 60:.4g}." in said
        for gap in GAPS:
            end = next(r for r in reversed(rows) if r.name == "accuracy" and r.axes["gap"] == gap)
            assert f"{fmt.percent(end.values['accuracy'])} at gap {gap:,}" in said
            means = {
                r.axes["family"]: r.values["score"]
                for r in rows
                if r.axes.get("reduce") == "mean" and r.axes["gap"] == gap and r.step == STEPS
            }
            top, low = sorted(means, key=lambda name: -means[name])
            lead = round(means[top], 2) - round(means[low], 2)
            text = f"at gap {gap:,} <b>{top}</b> is highest with {fmt.score(means[top])}, {fmt.score(lead)} above {low}"
            assert f"{text} ({fmt.score(means[low])})" in said
        assert re.sub("<[^>]+>", "", said.split(". ")[0]) in page.text


def test_who_wins_is_read_from_the_data(built):
    paths, _ = built
    winners = [re.findall(r"<b>(\w+)</b> is highest", sentences(load_run(path))) for path in paths]
    assert winners == [["gdn", "gdn"], ["nope", "nope"], ["nope", "nope"]]


def test_frozen_layers_are_marked(built):
    paths, html = built
    vanilla, frozen, released = load_runs(paths)
    assert vanilla.freezes == ()
    assert (frozen.freezes[0].layers, frozen.freezes[0].start, frozen.freezes[0].stop) == ((0, 2), 0, None)
    assert "<mark>gdn</mark> nope" in layout_text(released.spec, released.freezes)
    assert "Frozen: gdn (layers 0 and 2; whole block) updates 1 to 250." in Page(html).text
    bands = [
        (rows[0]["step"], rows[0]["stop"])
        for spec in Page(html).specs
        for rows in spec["datasets"].values()
        if rows and "stop" in rows[0]
    ]
    assert bands == [(0, STEPS), (0, 250)] * 4


def test_freezes_may_be_objects(tmp_path):
    told = {"families": ["nope"], "scope": "mixer", "start": 5, "stop": None}
    run = load_run(write_run(tmp_path / "objects", small_spec(), [], settings([told])))
    assert (run.freezes[0].layers, run.freezes[0].scope, run.freezes[0].updates) == (
        (1, 3),
        "mixer",
        "from update 6 on",
    )


def test_the_blocks_tell_their_layer(built):
    _, html = built
    blocks = [attrs for tag, attrs in Page(html).tags if tag == "li" and "data-facts" in attrs]
    assert len(blocks) == 12
    spec = small_spec()
    params = fmt.count(cost(spec, 1024).layers[2].params)
    assert (blocks[2]["data-title"], blocks[2]["data-line"]) == ("Layer 2: gdn", "2 gdn")
    assert params in (blocks[2]["aria-label"] or "")
    assert "updates 1 to 250" in (blocks[10]["data-facts"] or "")


def test_costs_are_those_of_the_model_and_its_twin(built):
    _, html = built
    page, spec = Page(html), small_spec()
    for model in (spec, full_attention_twin(spec)):
        for context in (1 << 10, 1 << 15, 1 << 20):
            at = cost(model, context)
            assert fmt.size(at.state_bytes).replace(fmt.SPACE, " ") in page.text
            assert fmt.flops(at.flops_per_token).replace(fmt.SPACE, " ") in page.text


def test_tables_and_charts_are_accessible(built):
    _, html = built
    page = Page(html)
    assert all(attrs.get("scope") for tag, attrs in page.tags if tag == "th")
    drawings = [attrs for _, attrs in page.tags if attrs.get("class") == "chart"]
    assert len(drawings) == 13
    assert all(attrs.get("role") == "img" and len(attrs.get("aria-label") or "") > 40 for attrs in drawings)
    assert "Loss of vanilla: training loss from " in html


@pytest.mark.parametrize("colours", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_contrast(colours):
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a: str, b: str) -> float:
        high, low = sorted((luminance(a), luminance(b)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for ground in (colours.surface, colours.raised):
        assert contrast(colours.ink, ground) >= 7
        assert contrast(colours.muted, ground) >= 4.5
        assert contrast(colours.accent, ground) >= 4.5
    for name, colour in colours.families.items():
        assert contrast(colour, colours.on_family) >= 4.5, name
        assert contrast(colour, colours.surface) >= 4.5, name


def test_a_run_without_records(tmp_path):
    path = write_run(tmp_path / "empty", small_spec("3*swa[window=128] nope"), [])
    build_report([path], tmp_path / "empty.html")
    page = Page((tmp_path / "empty.html").read_text())
    for absent in (
        "Nothing has been recorded yet.",
        "No loss was recorded.",
        "No accuracy was recorded.",
        "No retrieval scores were recorded.",
        "No config.json",
    ):
        assert absent in page.text
    assert len(page.specs) == 1  # the cost is known all the same


def test_a_run_on_text_beside_one_on_a_task(built, tmp_path):
    spec = small_spec(num_layers=2, vocab_size=512)
    path = write_run(tmp_path / "text", spec, text_records(spec), {"name": "text", "steps": 2000})
    html = render(load_runs([path, built[0][0]]))
    page = Page(html)
    assert "The held-out loss ends at" in page.text and "No retrieval scores were recorded." in page.text
    assert "No accuracy recorded." in page.text and "No scores recorded." in page.text
    assert "Two runs of two models" in page.text


def test_values_that_are_not_finite(tmp_path):
    spec = small_spec()
    rows = [Record(kind="train", name="loss", step=s, values={"loss": v}) for s, v in enumerate((2.0, 1.5, None), 1)]
    rows += [Record(kind="eval", name="accuracy", step=3, values={"accuracy": None}, axes={"gap": 64})]
    rows += [
        Record(kind="probe", name="retrieval_score", step=s, values={"score": v}, axes={"layer": 0, "gap": 64})
        for s, v in ((1, 0.5), (2, None))
    ]
    run = load_run(write_run(tmp_path / "broken", spec, rows, {"name": "broken"}))
    said = sentences(run)
    assert "ends at 1.5 (update 2). 1 of 3 recorded losses is not finite, the last one among them." in said
    assert "No held-out measurement was recorded." in said
    assert "Retrieval scores by family, in logits (update 1): at gap 64 <b>gdn</b>, the only family, has 0.50." in said
    for spec in Page(render([run])).specs:
        check(spec)


def test_family_means_are_taken_where_none_are_recorded(tmp_path):
    rows = [
        Record(kind="probe", name="retrieval_score", step=5, values={"score": score}, axes={"layer": layer, "gap": 8})
        for layer, score in enumerate((1.0, 4.0, 2.0, -4.0))
    ]
    run = load_run(write_run(tmp_path / "layers", small_spec(), rows))
    means = data.family_scores(run)[Condition(None, 8)]
    assert {name: series[-1].value for name, series in means.items()} == {"gdn": 1.5, "nope": 0.0}


def test_a_mean_that_names_no_task_is_of_the_run_s_task(built):
    run = load_run(built[0][0])
    assert list(data.family_scores(run)) == list(data.layer_scores(run)) == [condition(gap) for gap in GAPS]


def condition(gap: int) -> Condition:
    return Condition("spaced-retrieval", gap)


def test_training_batches_stand_in_for_held_out_accuracy(tmp_path):
    rows = [
        Record(kind="train", name="gap_loss", step=s, values={"loss": 1.0, "accuracy": s / 10}, axes={"gap": 64})
        for s in range(10)
    ]
    page = Page(render([load_run(write_run(tmp_path / "young", small_spec(), rows))]))
    assert "this is the accuracy on training batches" in page.text
    assert "No held-out measurement was recorded." in page.text


def test_names_are_escaped(tmp_path):
    name = "<script>alert(1)</script>"
    config = {"name": name, "note": "</script><b>"}
    rows = [Record(kind="train", name="loss", step=1, values={"loss": 1.0}, provenance={"device": "<i>"})]
    path = write_run(tmp_path / "a&b <i>", small_spec(), rows, config)
    html = render(load_runs([path]))
    assert name not in html and "<i>a&b" not in html and "a&amp;b &lt;i&gt;" in html
    assert len(Page(html).specs) == 2


def test_settings_that_differ(built):
    page = Page(built[1])
    table = page.text.split("Settings that differ")[1].split("All settings")[0]
    assert "recurrent:0-250" in table and "frozen@250" in table and "batch_size" not in table
    assert flatten({"a": {"b": [1, 2]}, "c": [], "d": None, "e": True}) == {
        "a.b": "1, 2",
        "c": "none",
        "d": "none",
        "e": "true",
    }


def test_records_of_another_model_are_pointed_out(tmp_path):
    other = small_spec("nope gdn")
    rows = [Record(kind="train", name="loss", step=1, values={"loss": 1.0}, provenance=provenance(other.hash))]
    page = Page(render([load_run(write_run(tmp_path / "mixed", small_spec(), rows))]))
    assert "but records of" in page.text and other.hash in page.text


def test_runs_of_one_name_are_told_apart(tmp_path):
    paths = [write_run(tmp_path / seed / "vanilla", small_spec(), []) for seed in ("s0", "s1")]
    assert [run.name for run in load_runs(paths)] == ["s0/vanilla", "s1/vanilla"]


def test_a_failed_write_leaves_the_old_page(built, tmp_path, monkeypatch):
    output = tmp_path / "report.html"
    output.write_text("old")

    def fail(*_):
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        build_report(built[0][:1], output)
    assert output.read_text() == "old" and [*tmp_path.glob("*.partial"), *tmp_path.glob(".*partial")] == []


def test_errors(tmp_path):
    spec = small_spec()
    with pytest.raises(ValueError, match=r"no run directory is given"):
        build_report([], tmp_path / "x.html")
    with pytest.raises(ValueError, match=r"run .*/nowhere: no such directory; a run is a directory with spec.json"):
        load_run(tmp_path / "nowhere")
    for file in ("spec.json", "records.jsonl"):
        path = write_run(tmp_path / file.split(".")[0], spec, [])
        (path / file).unlink()
        with pytest.raises(ValueError, match=rf"run .*: {file} is missing; a run is a directory with") as error:
            load_run(path)
        assert "\n" not in str(error.value)
    path = write_run(tmp_path / "wrong", spec, [], settings(["kda:0-5"]))
    with pytest.raises(ValueError, match=r"config.json: freeze\[0\]: family 'kda': no layer has it"):
        load_run(path)


def test_figures_are_saved_without_a_network(built, tmp_path):
    runs = load_runs(built[0][:2])
    look = Look(palette=palette.DARK)
    charts.figure(charts.loss(runs, look), look=look).save(tmp_path / "loss.svg")
    charts.figure(charts.scores(runs, condition(8192))).save(tmp_path / "scores.png")
    svg = (tmp_path / "loss.svg").read_text()
    assert "vanilla" in svg and "gdn frozen" in svg and palette.DARK.ink in svg and "var(" not in svg
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")


def test_smoothing_keeps_a_straight_line():
    line = [data.Point(step, 2.0 * step) for step in range(1000)]
    middle = charts.smoothed(line)[20:-20]
    assert all(point.value == pytest.approx(2.0 * point.step) for point in middle)
    assert charts.smoothed(line[:99]) == line[:99] and len(charts.smoothed(line)) <= charts.MOST_POINTS + 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gdn nope", [("gdn", 1), ("nope", 1)]),
        ("3*kda nope", [("3*kda", 3), ("nope", 1)]),
        ("2*heads(3:gdn, 1:nope)[norm=true] full", [("2*heads(3:gdn, 1:nope)[norm=true]", 2), ("full", 1)]),
    ],
)
def test_layouts_are_split_at_layers(text, words):
    assert split_layout(text) == words


def test_every_kind_of_block_is_drawn(tmp_path):
    layout = "swa[window=8] heads(3:gdn, 1:nope) kda mix(swa[window=8] + gdn) mamba2 lightning gla full"
    spec = small_spec(layout, num_layers=8, num_heads=4, d_model=256)
    html = render([load_run(write_run(tmp_path / "zoo", spec, [], settings([freeze(3, 9)])))])
    page = Page(html)
    for word in ("3 gdn", "1 nope", "heads(gdn, nope)", "mix(swa + gdn)", "Kimi Delta Attention", "recurrent"):
        assert word in page.text
    assert "Frozen: recurrent (layers 1, 2, 3, 4, 5 and 6; whole block) updates 4 to 9." in page.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (fmt.count(9999), "9,999"),
        (fmt.count(3_600_000), "3.6 M"),
        (fmt.size(0), "0 B"),
        (fmt.size(1 << 30), "1 GiB"),
        (fmt.size(70_144), "68.5 KiB"),
        (fmt.flops(538.4e6), "538 MFLOP"),
        (fmt.context(1 << 15), "32K"),
        (fmt.duration(41.6), "42 s"),
        (fmt.duration(3725), "1 h 2 min"),
        (fmt.score(-0.051), "\u22120.05"),
        (fmt.score(-0.001), "0.00"),
        (fmt.percent(1), "100%"),
        (fmt.percent(0.9999), "99.990%"),
        (fmt.percent(0.985), "98.5%"),
        (fmt.percent(1.0562), "105.6%"),
        (fmt.plural(3, "layer"), "three layers"),
    ],
)
def test_numbers_are_written_for_people(text, expected):
    assert text.replace(fmt.SPACE, " ") == expected


def test_a_long_run_stays_small_and_quick(tmp_path):
    spec = small_spec()
    path = write_run(tmp_path / "long", spec, [], {"name": "long"})
    rows = (Record(kind="train", name="loss", step=s, values={"loss": 1 / s}) for s in range(1, 30_001))
    append(path / "records.jsonl", rows)
    html = render([load_run(path)])
    assert len(html.encode()) < 1_200_000
