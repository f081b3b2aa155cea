import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import benchmark_files as files
from breakeven import artefacts, comparison, reportpage, tables
from breakeven.cli import UserError

ROOT = Path(__file__).parents[2]
SOURCES = {
    "template": ROOT / "report/comparison.html.j2",
    "style": ROOT / "report/style.mplstyle",
    "reference": ROOT / "resources/reference-case.json",
}
HOSTILE = '<script>alert("x")</script> <img src="http://evil.example/x.png" onerror=alert(1)> {{ 7 * 7 }} </details>'


def specs():
    """A baseline and three arms: faster, slower, refused."""
    base = files.default()
    fast = files.default("vllm-own-k3", k=3, drafter="own", rate=42.0)
    slow = files.default("vllm-own-k5", k=5, drafter="own", rate=20.0)
    sampled = files.default("vllm-own-k3-sampled", k=3, drafter="own", rate=42.0)
    sampled["parameters"]["protocol"]["temperature"] = 0.7
    return base, fast, slow, sampled


def compare(folder, arms):
    for spec in arms:
        files.write(folder / "benchmarks", spec)
    offline = {"own": files.write_offline(folder / "offline.parquet")}
    out = folder / "comparison"
    names = [spec["parameters"]["arm"] for spec in arms]
    comparison.run(
        folder / "benchmarks", names, offline,
        out / "summary.parquet", out / "acceptance.parquet", out / "requests.parquet",
    )  # fmt: skip
    return out


def build(folder, manifests=()):
    out = folder / "report" / "index.html"
    reportpage.build(folder / "comparison", manifests, out, folder / "report", **SOURCES)
    return out.read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """(folder, page) of an ordinary comparison whose outputs, commands and parameters are hostile."""
    folder = tmp_path_factory.mktemp("report")
    arms = specs()
    for spec in arms:
        spec["text"] = HOSTILE
        spec["server"] = {"command": ["serve", "--chat-template", HOSTILE]}
    compare(folder, arms)
    target = folder / "manifest.json"
    artefacts.write_manifest(target, "target", parameters={"source": HOSTILE, "nested": {"revision": "abc"}})
    manifests = [target, folder / "absent.json", *sorted((folder / "benchmarks").glob("*/*.json"))]
    return folder, build(folder, manifests)


class Elements(HTMLParser):
    """Collects (tag, attributes) and checks that elements nest."""

    VOID = {"meta", "img", "br", "link", "input"}

    def __init__(self, html):
        super().__init__()
        self.found, self.open = [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def text_of(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", "", html, flags=re.S)))


def test_it_says_what_was_found(page):
    _, html = page
    text = text_of(html)
    assert "Speculation pays here: the best arm" in re.search(r"<h1>(.*?)</h1>", html)[1]
    for word in ("faster", "slower", "refused", "baseline", "not judged", "other-sampling: temperature 0.7 against 0"):
        assert word in text
    for word in ("A/A noise floor", "5 prompts × 3 passes", "recorded elsewhere", "82.5 tok/s", "49.0, 57.5, 55.0"):
        assert word in text
    assert "source" in text and "nested.revision = abc" in text and "absent.json" not in text


def test_it_shows_what_the_preflight_found(tmp_path):
    base, fast, *_ = specs()
    fast["findings"] = [files.finding("algorithm", allowed=True)]
    fast["parameters"]["allow"] = ["algorithm"]
    wrong = files.default("vllm-wrong-k3", k=3, drafter="wrong")
    wrong["unmeasured"], wrong["findings"] = dict.fromkeys((1, 2, 3), "preflight"), [files.finding("layer-ids")]
    compare(tmp_path, (base, fast, wrong))
    html = build(tmp_path)
    assert not Elements(html).open
    text = text_of(html)
    assert "vllm-own-k3 algorithm ERROR, allowed algorithm is wrong: 1, not 2" in text
    assert "Refused: preflight: layer-ids: layer-ids is wrong: 1, not 2; mend: mend layer-ids." in text
    assert "Speculation pays" in text


def test_it_is_self_contained_and_well_formed(page):
    _, html = page
    elements = Elements(html)
    assert not elements.open
    for tag, attributes in elements.found:
        assert tag not in ("script", "link", "iframe", "object")
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "srcset", "data"):
            assert attributes.get(name, "data:").startswith(("data:", "#"))
    assert "url(" not in html and "@import" not in html


def test_it_is_accessible(page):
    elements = Elements(page[1]).found
    images = [attributes for tag, attributes in elements if tag == "img"]
    assert len(images) == 2 and all(len(image["alt"]) > 40 for image in images)
    assert all("scope" in attributes for tag, attributes in elements if tag == "th")
    assert elements[0] == ("html", {"lang": "en"})


def test_hostile_text_is_escaped(page):
    _, html = page
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;" in html
    assert "<script" not in html and "49" not in re.findall(r"onerror=alert\(1\)&gt; (\S+)", html)


def test_figures_are_written_and_the_same_each_time(page):
    folder, html = page
    before = {path.name: path.read_bytes() for path in (folder / "report").glob("*.svg")}
    assert set(before) == {"speedups.svg", "acceptance.svg"}
    build(folder)
    assert before == {path.name: path.read_bytes() for path in (folder / "report").glob("*.svg")}


def test_cause_and_prediction_are_shown(page, tmp_path):
    folder, _ = page
    (tmp_path / "comparison").mkdir()
    for path in (folder / "comparison").iterdir():
        (tmp_path / "comparison" / path.name).write_bytes(path.read_bytes())
    summary = artefacts.read_table(folder / "comparison" / "summary.parquet")
    n = summary.num_rows
    for name, values in {
        "cause": pa.array([None, "cost", "training", None][:n], pa.string()),
        "fault": pa.array([None, None, "too few samples", None][:n], pa.string()),
        "predicted_speedup": pa.array([None, 1.371, 0.5, None][:n], pa.float64()),
    }.items():
        summary = summary.set_column(summary.column_names.index(name), name, values)
    pq.write_table(summary, tmp_path / "comparison" / "summary.parquet")
    text = text_of(build(tmp_path))
    for word in ("Cause", "cost", "too few samples", "1.37", "Predicted"):
        assert word in text


def test_the_why_of_each_arm_is_shown(page):
    _, html = page
    text = text_of(html)
    assert "Why" in text and "What would pay" in text
    assert "step cost rho" in text and "above break-even" in text


@pytest.mark.parametrize(
    "chosen, sentence",
    [
        ([0], "Nothing was compared"),
        ([0, 1], "Speculation pays here: vLLM, drafter own, K = 3 generates"),
        ([0, 2], "Speculation does not pay here: vLLM, drafter own, K = 5"),
        ([0, 3], "No comparison stands"),
    ],
)
def test_headlines(tmp_path, chosen, sentence):
    compare(tmp_path, [specs()[i] for i in chosen])
    assert sentence in text_of(build(tmp_path))


def test_different_signs_on_two_protocols_depend(tmp_path):
    base, fast, slow, _ = specs()
    other = files.default("vllm-none-long")
    for spec in (other, slow):
        spec["parameters"]["protocol"] |= {"name": "long", "max_tokens": 512}
    compare(tmp_path, [base, fast, other, slow])
    html = text_of(build(tmp_path))
    assert "It depends: it pays with vLLM, drafter own, K = 3, protocol quick (1." in html
    assert "it does not pay with vLLM, drafter own, K = 5, protocol long (0." in html


def test_undecided_and_too_few_prompts(tmp_path):
    arms = specs()[:2]
    for spec in arms:
        spec["prompts"] = files.PROMPTS[:3]
    compare(tmp_path, arms)
    html = text_of(build(tmp_path))
    assert "Undecided: vLLM, drafter own, K = 3" in html and "too few prompts for an interval" in html


def test_reference_case_is_derived_from_its_numbers():
    case = reportpage.reference_case(artefacts.read_json(SOURCES["reference"]))
    vllm, sglang = case["rows"][:2]
    assert vllm["speedup"] == pytest.approx(54.6 / 82.5)
    assert vllm["speedup_low"] < 0.66 < vllm["speedup_high"] < 1
    assert sglang["rho"] == pytest.approx([2.0 * 90 / 56.7, 2.5 * 90 / 56.7]) and sglang["speedup_low"] is None


def test_script(page, tmp_path):
    folder, _ = page
    command = [
        sys.executable, ROOT / "scripts/report.py", "--comparison", folder / "comparison",
        "--out", tmp_path / "index.html", "--figures", tmp_path,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "Speculation pays" in done.stderr
    command[command.index(folder / "comparison")] = tmp_path
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 1 and "summary.parquet: no such file" in failed.stderr


def test_an_old_summary_is_an_error(page, tmp_path):
    summary = artefacts.read_table(page[0] / "comparison" / "summary.parquet", tables.SUMMARY)
    pq.write_table(summary.drop_columns(["rho"]), tmp_path / "summary.parquet")
    with pytest.raises(UserError, match="'rho' is missing"):
        reportpage.load(tmp_path, SOURCES["reference"])
