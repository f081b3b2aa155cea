"""The comparison page in a real browser: no network, no console error, sliders, tables, copying, phones, the dark, print.

Run with tests/browser/run; needs a chromium on the PATH and the packages of tests/browser/requirements.lock, and is
skipped without them. Screenshots go to the folder that BREAKEVEN_SCREENSHOTS names.
"""

import csv
import json
import os
import re
import shutil
from pathlib import Path

import pytest

import benchmark_files as files
import test_reportpage as unit
from breakeven import artefacts, reportpage, tables

playwright = pytest.importorskip("playwright.sync_api", reason="no playwright; use tests/browser/run")
CHROMIUM = os.environ.get("BREAKEVEN_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(not CHROMIUM, reason="no chromium on the PATH")]

WIDTHS = {"phone": 360, "tablet": 820, "desktop": 1400}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The page of a baseline and three arms (hostile texts), with step costs, training curves and findings."""
    folder = tmp_path_factory.mktemp("a page")
    arms = unit.specs()
    for spec in arms:
        spec["text"] = unit.HOSTILE
        spec["server"] = {"command": ["serve", "--chat-template", unit.HOSTILE]}
    arms[1]["findings"] = [files.finding("algorithm", allowed=True)]
    unit.compare(folder, arms)
    artefacts.write_table(folder / "vllm.parquet", unit.step_costs(), tables.STEP_COST)
    artefacts.write_table(folder / "training.parquet", unit.training(), tables.TRAINING)
    out = folder / "report" / "index.html"
    reportpage.build(
        folder / "comparison", sorted((folder / "benchmarks").glob("*/*.json")), out, folder / "report", **unit.SOURCES,
        step_costs=[folder / "vllm.parquet"], training={"own": folder / "training.parquet"},
    )  # fmt: skip
    return out


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, built, request):
    """The page in a fresh context; afterwards nothing was logged, and nothing but the file was asked for."""
    options = getattr(request, "param", {})
    context = browser.new_context(**options, accept_downloads=True)
    page = context.new_page()
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: (said.append("a dialog"), dialog.dismiss()))
    page.on("request", lambda asking: asked.append(asking.url))
    page.goto(built.as_uri())
    yield page
    context.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("data:", built.as_uri()))] == []


def cells(page, table, column):
    return page.locator(f"{table} tbody tr > :nth-child({column})").all_inner_texts()


def test_the_sliders_move_the_table(opened):
    out = {name: opened.locator(f"form.pay td[data-out={name}]") for name in ("speedup", "ceiling", "needed", "step")}
    al, rho = opened.locator("input[name=al]"), opened.locator("input[name=rho]")
    before = out["speedup"].inner_text()
    assert float(before[:-1]) == pytest.approx(float(al.input_value()) / float(rho.input_value()), abs=0.006)
    opened.locator("input[name=k]").fill("3")
    for slider, value in ((al, "2"), (rho, "1.6")):
        slider.fill(value)
    assert out["speedup"].inner_text() == "1.25×" != before
    assert out["ceiling"].inner_text() == "2.50×"
    assert float(out["needed"].inner_text()) == pytest.approx(reportpage.stepcost.needed_conditional(1.6, 3), abs=6e-4)
    assert out["step"].inner_text() == "a step may take 25 % longer"
    sentence = opened.locator("[data-out=sentence]")
    assert sentence.get_attribute("aria-live") == "polite" and "1.25 times" in sentence.inner_text()
    rho.focus()
    opened.keyboard.press("ArrowRight")
    assert rho.input_value() == "1.61" and out["speedup"].inner_text() == "1.24×"
    rho.fill("4")
    al.fill("1")
    assert "no drafter can pay" in sentence.inner_text()


def test_a_step_yields_no_more_than_k_allows(opened):
    """An arm's own length stays put when K is made smaller, but never above K + 1."""
    assert float(opened.locator("form.pay option").first.get_attribute("data-al")) > 2
    opened.locator("input[name=k]").fill("1")
    speedup, ceiling = (opened.locator(f"form.pay td[data-out={name}]").inner_text() for name in ("speedup", "ceiling"))
    assert speedup == ceiling and opened.locator("form.pay span[data-out=al]").inner_text() == "2.00"


def test_each_arm_fills_the_sliders(opened):
    select = opened.locator("select[name=arm]")
    for i in range(select.locator("option").count()):
        select.select_option(index=i)
        option = select.locator("option").nth(i)
        length, cost = (float(option.get_attribute(f"data-{name}")) for name in ("al", "rho"))
        assert float(opened.locator("input[name=al]").input_value()) == pytest.approx(length, abs=0.006)
        assert opened.locator("form.pay td[data-out=speedup]").inner_text() == f"{length / cost:.2f}×"
        assert opened.locator("input[name=k]").input_value() == option.get_attribute("data-k")


def test_tables_sort_by_mouse_and_keyboard(opened):
    table = "section[aria-labelledby=stepcost] table"
    heading = opened.locator(f"{table} thead th").nth(6)
    heading.locator("button").click()
    rising = [float(text.split()[0]) for text in cells(opened, table, 7)]
    assert rising == sorted(rising) and heading.get_attribute("aria-sort") == "ascending"
    heading.locator("button").focus()
    opened.keyboard.press("Enter")
    falling = [float(text.split()[0]) for text in cells(opened, table, 7)]
    assert falling == sorted(falling, reverse=True) != rising and heading.get_attribute("aria-sort") == "descending"


def test_sorting_keeps_remarks_with_their_arm_and_groups_apart(opened):
    def rows():
        return opened.locator("section[aria-labelledby=arms] table.sortable tbody tr").all_inner_texts()

    before = rows()
    opened.locator("section[aria-labelledby=arms] table.sortable thead th button").nth(2).click()
    after = rows()
    assert sorted(after) == sorted(before) and after != before
    assert after[0].startswith("Protocol") and [i for i, row in enumerate(after) if "recorded elsewhere" in row]
    at = next(i for i, row in enumerate(after) if row.startswith("Refused:"))
    assert "refused" in after[at - 1]


def test_tables_filter(opened):
    field = opened.locator("section[aria-labelledby=stepcost] input[type=search]")
    rows = opened.locator("section[aria-labelledby=stepcost] tbody tr")
    every = rows.count()
    field.fill("sglang")
    shown = opened.locator("section[aria-labelledby=stepcost] tbody tr:visible").count()
    assert 0 < shown < every
    assert opened.locator("section[aria-labelledby=stepcost] [role=status]").inner_text() == f"{shown} of {every} rows"
    field.fill("")
    assert opened.locator("section[aria-labelledby=stepcost] tbody tr:visible").count() == every


def test_tables_are_saved_as_csv_and_json(opened, tmp_path):
    for suffix in ("csv", "json"):
        with opened.expect_download() as waiting:
            opened.locator(f"section[aria-labelledby=arms] a[download='arms.{suffix}']").click()
        waiting.value.save_as(tmp_path / f"arms.{suffix}")
    with open(tmp_path / "arms.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["arm"] for row in rows] == [row["arm"] for row in json.loads((tmp_path / "arms.json").read_text())]
    assert list(rows[0]) == tables.SUMMARY.names


def test_command_lines_are_copied(opened):
    opened.context.grant_permissions(["clipboard-read", "clipboard-write"])
    block = opened.locator("pre.command").first
    opened.locator("button.copy").first.click()
    opened.get_by_text("copied", exact=True).first.wait_for()
    assert opened.evaluate("navigator.clipboard.readText()") == block.inner_text()


@pytest.mark.parametrize("opened", [{"java_script_enabled": False}], indirect=True)
def test_without_scripts_everything_is_there_to_read(opened):
    assert not opened.locator("form.pay").is_visible()
    assert opened.locator("section[aria-labelledby=pay] table.sortable").is_visible()
    assert opened.locator("button").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", WIDTHS)
def test_it_fits_and_is_accessible(browser, built, name, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    context = browser.new_context(viewport={"width": WIDTHS[name], "height": 900}, color_scheme=scheme)
    # axe-core is put into the page by the driver, which the page's own policy would refuse.
    page = context.new_page()
    page.goto(built.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[name]
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[name]
    if folder := os.environ.get("BREAKEVEN_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"page-{name}-{scheme}.png", full_page=True)
    results = axe.Axe().run(page).response["violations"]
    bad = [f"{found['id']}: {found['nodes'][0]['html'][:200]}" for found in results if found["impact"] != "minor"]
    context.close()
    assert bad == []


def test_printed_it_shows_values_and_no_controls(browser, built):
    page = browser.new_page()
    page.goto(built.as_uri())
    page.emulate_media(media="print", color_scheme="dark")
    assert not page.locator("form.pay").is_visible() and not page.locator("button.copy").first.is_visible()
    assert page.locator("section[aria-labelledby=pay] table.sortable").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.close()


def test_it_is_valid_html(built):
    html5lib = pytest.importorskip("html5lib")
    parser = html5lib.HTMLParser(strict=False)
    parser.parse(built.read_text())
    assert [(place, code) for place, code, _ in parser.errors] == []
    ids = re.findall(r' id="([^"]+)"', built.read_text())
    assert len(ids) == len(set(ids))
