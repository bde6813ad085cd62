"""The documents: every link has a target, and every file they name exists."""

from __future__ import annotations

import re
from inspect import ismodule
from pathlib import Path
from xml.etree import ElementTree

import pytest

import mrv1
import mrv1.kernels
import mrv1.runner
from docs import chat_picture

REPO = Path(__file__).resolve().parents[1]
PAGES = sorted([*REPO.glob("*.md"), *REPO.glob("docs/*.md"), *REPO.glob("benchmarks/**/*.md")])


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading.lower()) for heading in headings]
    return {re.sub(r"\s", "-", word.strip()) for word in words}


def _broken_links(page: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        name, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPO)))
def test_every_link_has_a_target(page):
    assert _broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A title, here\n[a](#a-title-here) [b](#no-title) [c](none.md) [d](page.md)\n"
    )
    assert _broken_links(page) == ["#no-title", "none.md"]


def test_no_page_of_the_site_links_to_a_file_outside_of_it():
    files = {*REPO.glob("docs/**/*"), *REPO.glob("benchmarks/*.md")}
    files |= set(REPO.glob("benchmarks/results/*.png"))
    outside = [
        (page.name, target)
        for page in REPO.glob("docs/**/*.md")
        for target in re.findall(r"\]\(([^)\s#]+)", page.read_text("utf-8"))
        if "://" not in target and (page.parent / target).resolve() not in files
    ]
    assert outside == []


def test_no_page_installs_mrv1_from_a_package_index():
    notebooks = REPO.glob("notebooks/*.ipynb")
    pages = [page.read_text("utf-8") for page in (*PAGES, *notebooks)]
    assert [each for each in pages if re.search(r"pip install\s+['\"]?mrv1\b", each)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "docs"])
def test_every_source_file_that_a_page_names_exists(page):
    names = re.findall(
        r"`((?:mrv1|tests|benchmarks|examples|notebooks)/[\w/.-]+)`", page.read_text("utf-8")
    )
    assert [name for name in names if not (REPO / name).exists()] == []


@pytest.mark.parametrize(
    ("page", "num_blocks"),
    [
        ("asyncio.md", 1),
        ("chat.md", 1),
        ("integrators.md", 6),
        ("multimodal.md", 2),
        pytest.param("recipes.md", 5, marks=pytest.mark.gpu),
        ("serving.md", 1),
        ("sleep.md", 2),
        ("structured.md", 1),
    ],
)
def test_the_examples_of_a_page_run(page, num_blocks):
    text = (REPO / "docs" / page).read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == num_blocks
    names: dict[str, object] = {}
    for block in blocks:  # each block continues the block before it
        exec(block, names)


def test_api_reference_names_every_public_name():
    pages = "".join(page.read_text("utf-8") for page in sorted(REPO.glob("docs/api/*.md")))
    named = set(re.findall(r"^::: [\w.]*\.(\w+)$", pages, re.MULTILINE))
    of_runner = {name for name, each in vars(mrv1.runner).items() if not ismodule(each)}
    of_runner = {name for name in of_runner if not name.startswith("_")}
    public = {*mrv1.__all__, *mrv1.kernels.__all__, *of_runner}
    # Type aliases, and the oracles, whose docstrings are those of the kernels.
    assert public - named == {"RequestId", "reference"}


def test_every_page_is_in_the_sites_navigation():
    navigation = (REPO / "mkdocs.yml").read_text("utf-8").partition("nav:")[2]
    pages = {str(page.relative_to(REPO)) for page in REPO.glob("docs/**/*.md")}
    hook = (REPO / "docs" / "site_files.py").read_text("utf-8")  # it needs mkdocs
    elsewhere = dict(re.findall(r'^    "(.+\.md)": "(.+\.md)",', hook, re.MULTILINE))
    on_site = {elsewhere.get(page, page.removeprefix("docs/")) for page in pages}
    in_navigation = re.findall(r"(?:- |: )([\w/-]+\.md)$", navigation, re.MULTILINE)
    assert on_site | set(elsewhere.values()) == set(in_navigation)
    assert len(in_navigation) == len(set(in_navigation))


# --- the picture of the chat --------------------------------------------------------------------


def test_the_picture_shows_what_a_program_printed_when():
    """The progress of loading is left out, waits are shortened, questions are typed by key."""
    printed = [
        (10.0, "\rLoading weights 10%"), (90.0, "\x1b[2Kon cpu\r\n"), (90.1, "> "),
        (95.0, "And?\r\n"), (95.5, "a <b>"), (95.75, "\r\n> "),
    ]  # fmt: skip
    pieces = [*chat_picture.timed(printed, ["And?"])]
    assert "".join(text for _, text in pieces) == (
        "$ mrv1 chat --temperature 0\non cpu\n> And?\na <b>\n> "
    )
    times = [moment for moment, _ in pieces]
    assert times == sorted(times)
    assert times[-1] - times[-2] == pytest.approx(0.25)
    assert times[-1] < 10
    drawn = ElementTree.fromstring(chat_picture.picture(pieces))
    shown = [each for each in drawn.iter() if each.tag.endswith("}text")]
    assert "".join(each.text for each in shown) == (
        "$ mrv1 chat --temperature 0on cpu> And?a <b>> "
    )
    assert len({each.get("y") for each in shown}) == 5


def test_the_picture_in_the_readme_is_of_this_program():
    text = "".join(ElementTree.parse(REPO / "docs" / "chat.svg").getroot().itertext())
    assert text.replace("\n", "").count("> ") == len(chat_picture.QUESTIONS) + 1
    assert "mrv1 chat --temperature 0" in text.replace("\n", "")
    assert "docs/chat.svg" in (REPO / "README.md").read_text("utf-8")
