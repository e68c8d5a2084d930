"""The files of the web page over HTTP: types, caching, the policy, names that are none; their weight, and what they took from others."""

import hashlib
import re
import sys
from pathlib import Path

import pytest

from zse.server.routes.web_page import POLICY, STATIC, TYPES

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import vendor_page  # noqa: E402

sys.path.remove(str(ROOT / "scripts"))
MAX_WEIGHT, MAX_LINES = 250_000, 500


def on_disk() -> set[str]:
    return {str(path.relative_to(STATIC)) for path in STATIC.rglob("*") if path.is_file()}


def test_every_file_is_in_the_table():
    assert on_disk() == TYPES.keys()


def test_the_page_is_small():
    loaded = [name for name in TYPES if not name.endswith("LICENSE")]
    assert sum((STATIC / name).stat().st_size for name in loaded) <= MAX_WEIGHT
    own = [STATIC / name for name in loaded if not name.startswith("vendor/")]
    assert max(len(path.read_text(encoding="utf-8").splitlines()) for path in own) <= MAX_LINES


@pytest.mark.parametrize("name", TYPES)
def test_a_file(server, name):
    path = "/" if name == "index.html" else f"/page/{name}"
    reply = server.get(path)
    assert reply.status == 200 and reply.body == (STATIC / name).read_bytes()
    assert reply.headers["content-type"] == TYPES[name] and reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["content-security-policy"] == POLICY and reply.headers["cache-control"] == "no-cache"
    tag = reply.headers["etag"]
    for known in (tag, f'"other", W/{tag}'):
        same = server.get(path, {"if-none-match": known, "connection": "close"})
        assert same.status == 304 and not same.body and same.headers["etag"] == tag
        assert "content-length" not in same.headers
    assert server.get(path, {"if-none-match": '"other"'}).status == 200


def test_the_policy_lets_nothing_in():
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules.pop("img-src") == "'self' data:"
    assert {rules.pop(name) for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert rules.pop("require-trusted-types-for") == "'script'"
    assert set(rules.values()) == {"'none'"}
    assert {"default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"} == rules.keys()


@pytest.mark.parametrize(
    "path",
    [
        "/page",
        "/page/",
        "/page/../app.py",
        "/page/%2e%2e/app.py",
        "/page/..%2f..%2fapp.py",
        "/page/vendor",
        "/page/vendor/../app.js",
        "/page//etc/passwd",
        "/page/app.js%00",
        "/page/APP.js",
        "/page/app.js/x",
        "/static/app.js",
        "/index.html",
        "/app.js",
    ],
)
def test_a_name_that_is_not_in_the_table(server, path):
    assert server.get(path).status in (400, 404)


def test_nothing_comes_from_elsewhere():
    """No file names another place, but for namespaces and the example of a link; no inline script or style, which the policy refuses."""
    allowed = ("http://www.w3.org/",)
    for name in TYPES:
        if name.endswith("LICENSE"):
            continue
        text = (STATIC / name).read_text(encoding="utf-8")
        found = [
            link for link in re.findall(r"(?:https?:)?//[\w.-]+\.\w[\w./-]*", text) if not link.startswith(allowed)
        ]
        assert not found, f"{name}: {found}"
        if not name.startswith("vendor/"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|dangerously", text
            ), name
    index = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|style=|\bon\w+=|<script(?! type=\"module\" src=)", index)


def test_what_is_vendored_is_what_the_script_wrote():
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (STATIC / "vendor").iterdir()}
    assert found == vendor_page.WRITTEN
    listed = {name: package for package in vendor_page.PACKAGES for name in package.files}
    assert listed.keys() == found.keys()
    for name, package in listed.items():
        assert (
            name.endswith("LICENSE")
            or f"{package.version}, {package.licence}" in (STATIC / "vendor" / name).read_text()
        )


def test_vendoring_takes_the_imports_as_paths():
    package = vendor_page.Package("a", "1.0", "MIT", "", {})
    text = 'import{x}from"preact";y();\n//# sourceMappingURL=a.map\n'
    assert (
        vendor_page.written(package, "a.js", text) == '/* a 1.0, MIT: a.LICENSE */\nimport{x}from"./preact.js";y();\n'
    )


def test_the_package_has_the_files():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    patterns = re.findall(r'"server/(static/[^"]*)"', text)
    found = {path for pattern in patterns for path in (STATIC.parent).glob(pattern) if path.is_file()}
    assert {str(path.relative_to(STATIC)) for path in found} == TYPES.keys()
