"""`disagg map --svg`: what is drawn is what the mapping says."""

import xml.etree.ElementTree as ET


def elements(path, name):
    return ET.parse(path).iter(f"{{http://www.w3.org/2000/svg}}{name}")


def test_the_drawing_has_a_cell_for_each_rank_and_a_line_for_each_contact(map_engines, tmp_path):
    path = tmp_path / "map.svg"
    arguments = ("--decode", "tp=2", "--prefill", "tp=8,cp=2,pp=2", "--kv", "mla", "--svg", path)
    assert map_engines(*arguments)[0] == 0
    titles = [title.text for title in elements(path, "title")]
    assert sum(text.startswith("decode tp") for text in titles) == 2
    prefill = [text for text in titles if text.startswith("prefill tp")]
    assert len(prefill) == 8 * 2 * 2
    assert sum(": real" in text for text in prefill) == 2 * 2
    assert sum(": dummy" in text for text in prefill) == 6 * 2
    assert sum(": idle" in text for text in prefill) == 8 * 2
    lines = list(elements(path, "line"))
    assert len(lines) == 8
    assert sum(line.get("class") == "dummy" for line in lines) == 6
    assert {float(line.get("y1")) for line in lines} == {150 + 44.0, 150 + 132.0}  # the middles of two rows of 88
    assert [float(line.get("y2")) for line in lines] == [150 + 22 * (tp + 0.5) for tp in range(8)]
    fills = {
        rect.find("{*}title").text: rect.get("fill")
        for rect in elements(path, "rect")
        if rect.find("{*}title") is not None
    }
    colours = {
        role: {fill for text, fill in fills.items() if f": {role}" in text} for role in ("real", "dummy", "idle")
    }
    assert all(len(fill) == 1 for fill in colours.values())
    assert len(set.union(*colours.values())) == 3
    assert map_engines(*arguments, "--rank", "1")[0] == 0
    assert [float(line.get("y1")) for line in elements(path, "line")] == [150 + 132.0] * 4


def test_the_drawing_of_very_many_lines_is_one_band(map_engines, tmp_path):
    path = tmp_path / "map.svg"
    pair = ("--decode", "tp=512", "--prefill", "tp=512,sharding=yes", "--kv", "mla")
    assert map_engines(*pair, "--svg", path)[0] == 0
    assert len(list(elements(path, "polygon"))) == 1
    assert not list(elements(path, "line"))
    assert path.stat().st_size < 500_000


def test_no_drawing_of_engines_that_do_not_fit(map_engines, tmp_path):
    path = tmp_path / "map.svg"
    status, _, err = map_engines("--decode", "tp=3", "--prefill", "tp=2", "--svg", path)
    assert (status, err) == (1, f"disagg map: --svg {path}: not written, the engines do not fit\n")
    assert not path.exists()
