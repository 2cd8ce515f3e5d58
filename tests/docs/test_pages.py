"""The site builds strictly; generated parts are those of the code; the reference has all names."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import flashattn_jit as fa
import flashattn_jit.variants.library as library
from benchmarks.cookbook import flex
from docs.generator import catalogue, cookbook, pictures
from docs.generator.doctests import fenced
from flashattn_jit.integrations import transformers as transformers_integration

ROOT = Path(__file__).resolve().parents[2]
API = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md")))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from this checkout; warnings are errors."""
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def text_of(page: Path) -> str:
    """The words of a built page's article."""
    article = re.search(r"<article.*?</article>", page.read_text(), re.DOTALL)
    assert article is not None
    return html.unescape(re.sub(r"<[^>]+>", "", article[0]))


def test_the_site_builds_strictly(site: Path) -> None:
    """Every page of docs/ is there, and files outside of it that pages link to."""
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("")
        built = site / "index.html" if name.name == "index" else site / name / "index.html"
        assert len(text_of(built)) > 200, built
    assert "prefill" in text_of(site / "repository/benchmarks/measured/cpu/index.html")
    assert "class SlidingALiBi" in text_of(site / "repository/examples/01_quickstart/index.html")


def test_links_of_the_site_lead_to_its_files(site: Path) -> None:
    """Also those that were rewritten, in every built page, anchors included."""
    ids: dict[Path, set[str]] = {}
    wrong = []
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        for link in re.findall(r'(?:href|src)="([^"]+)"', page.read_text()):
            path, _, anchor = html.unescape(link).partition("#")
            if re.match(r"[a-z]+:", path) or path.startswith("/"):
                continue
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                wrong.append(f"{page.relative_to(site)}: {link}")
            elif anchor and target.suffix == ".html":
                if target not in ids:
                    ids[target] = set(re.findall(r'\bid="([^"]+)"', target.read_text()))
                if html.unescape(anchor) not in ids[target] and anchor != "__skip":
                    wrong.append(f"{page.relative_to(site)}: {link}")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_links_have_titles_of_pages(site: Path) -> None:
    """And not the names of files, which the site does not have."""
    for page in site.rglob("*.html"):
        names = re.findall(r'<a href="[^"#]*/(?:#[^"]*)?">([^<]*\.md)</a>', page.read_text())
        assert not names, f"{page.relative_to(site)}: {names}"


def test_constructors_have_signatures(site: Path) -> None:
    page = text_of(site / "api/batches/index.html")
    for name in ("BatchAttention", "CascadeAttention"):
        found = re.search(rf"{name}\(\s*variant=None,\s*\*,\s*num_q_heads,", page)
        assert found, f"{name} shows no signature"
    assert re.search(r"Limits\(\s*max_requests", page)
    assert re.search(r"Paged\(\s*page_indptr", page)
    page = text_of(site / "api/kv/index.html")
    firsts = {"Cache": "spec", "Spec": "groups", "Group": "layers", "Format": "code"}
    for name, first in firsts.items():
        assert re.search(rf"\b{name}\(\s*{first}", page), f"{name} shows no signature"
    assert "giving_back" not in page


def test_examples_of_docstrings_are_code_on_the_site(site: Path) -> None:
    page = (site / "api/batches/index.html").read_text()
    assert "<blockquote>" not in page, "a >>> that became a quotation"
    assert page.count('class="gp"') > 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A.\n\n>>> f()\n1", "A.\n\n```pycon\n>>> f()\n1\n```"),
        ("A.\n>>> f(\n...     x)\n\nB.", "A.\n\n```pycon\n>>> f(\n...     x)\n```\n\nB."),
        ("Example:\n    >>> f()\n", "Example:\n    ```pycon\n    >>> f()\n    ```"),
        ("no example", "no example"),
    ],
)
def test_doctests_are_fenced(text: str, expected: str) -> None:
    assert fenced(text) == expected


def test_the_reference_has_every_public_name() -> None:
    documented = set(re.findall(r"^::: flashattn_jit\.(\S+)$", API, re.MULTILINE))
    wanted = {name for name in fa.__all__ if name != "variants"}
    wanted |= {f"kv.{name}" for name in fa.kv.__all__}
    wanted |= {
        f"integrations.transformers.{name}"
        for name in transformers_integration.__all__
        if name.lstrip("_")[0].islower() or name[0].isupper() and not name.isupper()
    }
    wanted |= set(catalogue.HELPERS) | {"integrations.torch.activate"}
    wanted |= {  # what explain() and verify() return
        "inspect.explanation.explanation.Explanation",
        "inspect.verification.verification.VerifyReport",
    }
    assert documented == wanted


def test_the_catalogue_has_every_variant_of_the_library() -> None:
    named = [entry.name for entry in catalogue.entries()] + list(catalogue.SCALINGS)
    assert sorted([*named, *catalogue.HELPERS]) == sorted(library.__all__)


def test_the_catalogue_is_that_of_the_docstrings() -> None:
    written = catalogue.PAGE.read_text()
    assert written == catalogue.page(), "run python -m docs.generator.catalogue"


def test_pictures_are_those_of_the_variants() -> None:
    made = {**catalogue.catalogue_pictures(), **cookbook.cookbook_pictures()}
    folders = ("catalogue", "cookbook")
    stored = {
        f"{folder}/{path.name}": path.read_text()
        for folder in folders
        for path in (pictures.PICTURES / folder).glob("*.svg")
    }
    assert sorted(stored) == sorted(made), "run python -m docs.generator.pictures"
    changed = [name for name, text in made.items() if text != stored[name]]
    assert not changed, f"run python -m docs.generator.pictures: {changed}"


def test_a_picture_is_that_of_a_mask() -> None:
    """The weights of a window, cell by cell, by a formula of its own; and what the SVG draws."""
    found = pictures.weights(fa.SlidingWindow(3), 8, 8, 2, 16)
    behind = torch.arange(8)[:, None] - torch.arange(8)
    assert (torch.from_numpy(found) == ((behind >= 0) & (behind < 3))).all()
    drawn = set()
    for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v1", pictures.svg(found, "window")):
        drawn |= {(int(y), column) for column in range(int(x), int(x) + int(width))}
    assert drawn == {(i, j) for i in range(8) for j in range(max(0, i - 2), i + 1)}


RECIPES = cookbook.recipes()


def test_the_cookbook_has_thirteen_recipes() -> None:
    assert [recipe.number for recipe in RECIPES] == [f"{i:02}" for i in range(1, 14)]
    text = cookbook.PAGE.read_text()
    for path in (pictures.PICTURES / "cookbook").glob("*.svg"):
        assert f"(../pictures/cookbook/{path.name})" in text


def test_the_times_of_the_cookbook_are_those_of_the_committed_results() -> None:
    text = cookbook.PAGE.read_text()
    assert text == cookbook.with_times(text)
    assert text.count("compiled FlexAttention ") >= 2 * 10


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.number)
def test_a_recipe_equals_its_eager_reference(recipe: cookbook.Recipe) -> None:
    """Also at a length that no block of the recipe divides evenly into tiles."""
    for tokens in (512, 320):
        names = recipe.run(tokens)
        q, k, v = (names[name] for name in "qkv")
        results = names["attend"](q, k, v)
        references = names["in_torch"](q.double(), k.double(), v.double())
        if not isinstance(results, tuple):
            results, references = (results,), (references,)
        for out, expected in zip(results, references, strict=True):
            torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.by_turns(3)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.number)
def test_the_benchmark_times_the_same_in_flex_attention(
    recipe: cookbook.Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncompiled, what `python -m benchmarks.cookbook` times equals the recipe."""
    if recipe.number in ("05", "09", "13"):
        assert recipe.number not in flex.FLEX
        return
    monkeypatch.setattr(flex, "compiled_flex", lambda: flex_attention)
    names = recipe.run(256)
    expected = names["in_torch"](*(names[name] for name in "qkv"))
    torch.testing.assert_close(flex.FLEX[recipe.number](names)(), expected, atol=2e-5, rtol=1e-4)
