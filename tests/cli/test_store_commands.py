import json

from zse.formats import catalog


def test_ls_shows_stored_partial_and_catalog(zse, home):
    (home / "models/.partial/smollm2").mkdir(parents=True)
    (home / "models/.partial/smollm2/.name").write_text("smollm2")
    lines = zse("ls").stdout.splitlines()
    assert lines[0].split() == ["MODEL", "SIZE", "STATE", "LICENCE"]
    assert [line.split()[0] for line in lines[1:]] == ["base", "echo", "smollm2", "gemma3-270m"]
    assert "resume" in lines[3] and "can be pulled" in lines[4] and "Gemma Terms" in lines[4]
    data = json.loads(zse("ls", "--json").stdout)
    assert [model["name"] for model in data["stored"]] == ["base", "echo"] and data["stored"][0]["bytes"] == 20
    assert [part["name"] for part in data["partial"]] == ["smollm2"]


def test_show_names_licence_and_source_before_and_after_the_pull(zse):
    entry = catalog.CATALOG["gemma3-270m"]
    text = zse("show", "gemma3-270m").stdout
    assert entry.licence in text and entry.sha256 in text and "not pulled" in text
    data = json.loads(zse("show", "smollm2", "--json").stdout)
    assert data["licence"] == "Apache-2.0" and data["download_bytes"] == 92871040
    data = json.loads(zse("show", "echo", "--json").stdout)
    assert data["state"] == "stored" and data["path"].endswith("echo/m.gguf")


def test_rm_asks_and_deletes(zse, home):
    assert zse("rm", "-y", "echo", "base").stdout == "deleted echo: 20 B freed\ndeleted base: 20 B freed\n"
    assert not (home / "models/echo").exists()


def test_version(zse):
    import zse as package

    assert zse("--version").stdout == f"zse {package.__version__}\n"
    assert json.loads(zse("version", "--json").stdout)["zse"] == package.__version__
    assert f"zse         {package.__version__}" in zse("version").stdout
