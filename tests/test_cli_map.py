"""`disagg map` of engines given by hand: tables and JSON that agree with the library, reasons, refusals."""

import os
import re
import subprocess
import sys

import pytest

import disagg
from disagg.rank_tables.pair import DecodeEngine, Pair
from disagg.rank_tables.text import WIDTH, render
from map_command import described

EXAMPLE = ("--decode", "tp=8,pp=1", "--prefill", "tp=4,pp=2,dp=2", "--kv", "mla")
EXAMPLE_TEXT = """\
decode  dp 1 x cp 1 x tp 8 x pp 1 = 8 ranks
prefill dp 2 x cp 1 x tp 4 x pp 2 = 16 ranks
kv mla; 8 prefill ranks in a dp group
fits

decode tp 2i and 2i+1 read prefill tp i
the decode holds all layers: it reads all 2 stages, later ones contacted first
room 7 is at dp rank 1 (room modulo dp size 2)

what each decode rank of one dp group reads
decode tp  pp  <- prefill tp  dummy tp  cp  pp   answers  destinations
---------  --  -------------  --------  --  ---  -------  ------------
0          0   0              -         0   0-1        2             2
1          0   0              -         0   0-1        2             2
2          0   1              -         0   0-1        2             2
3          0   1              -         0   0-1        2             2
4          0   2              -         0   0-1        2             2
5          0   2              -         0   0-1        2             2
6          0   3              -         0   0-1        2             2
7          0   3              -         0   0-1        2             2

what each prefill rank of one dp group serves
prefill tp  cp  pp  role  -> decode tp  pp  waits for
----------  --  --  ----  ------------  --  ---------
0           0   0   real  0-1           0           2
0           0   1   real  0-1           0           2
1           0   0   real  2-3           0           2
1           0   1   real  2-3           0           2
2           0   0   real  4-5           0           2
2           0   1   real  4-5           0           2
3           0   0   real  6-7           0           2
3           0   1   real  6-7           0           2
"""


def test_the_table_shows_both_directions_and_the_room():
    command = [sys.executable, "-m", "disagg.cli", "map", *EXAMPLE, "--room", "7"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, EXAMPLE_TEXT, "")


def test_dummies_and_idle_ranks_are_named(map_engines):
    status, out, _ = map_engines("--decode", "tp=2", "--prefill", "tp=4,cp=2", "--kv", "mla")
    assert status == 0
    assert "decode tp i reads prefill tp 2i and contacts 2i+1 as dummies" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["1", "0", "2", "3", "0", "0", "1", "1"] in rows  # the decode's: reads tp 2, tp 3 is a dummy
    assert ["3", "0", "0", "dummy", "1", "0", "1"] in rows
    assert ["3", "1", "0", "idle", "-", "-", "0"] in rows


def test_all_reasons_come_at_once_with_status_1(map_engines):
    status, out, err = map_engines(
        "--decode", "tp=6,pp=3,page_size=64,kv_heads=7,dtype=bf16", "--prefill", "tp=4,pp=2,page_size=32,dtype=auto"
    )
    assert (status, err) == (1, "")
    assert "does not fit: 4 reasons, 1 warning" in out
    text = " ".join(out.split())
    for reason in (
        "fatal: page_size 64 here, 32 at the prefill: must be equal",
        "warning: kv_cache_dtype bf16 here, auto at the prefill: must be equal",
        "fatal: prefill tp 4 does not divide decode tp 6",
        "fatal: num_kv_heads 7 over tp 6 here, 7 over tp 4 at the prefill: one must divide the other",
        "fatal: decode pp 3, prefill pp 2: must be equal, or 1 at the decode",
    ):
        assert reason in text


def test_what_is_not_given_is_not_compared(map_engines):
    for stated in ("page_size=16", "dtype=fp8_e4m3", "layout=hnd", "policy=early"):
        assert map_engines("--decode", f"tp=1,{stated}", "--prefill", "tp=1")[0] == 0
        assert map_engines("--decode", "tp=1", "--prefill", f"tp=1,{stated}")[0] == 0


def test_one_rank_shows_its_contacts_in_order(map_engines):
    """A1-09."""
    status, out, _ = map_engines("--decode", "tp=2,dp=2", "--prefill", "tp=4,pp=2", "--rank", "3")
    assert status == 0
    text = " ".join(out.split())
    assert "decode rank 3 (tp 1) awaits 4 answers; each prefill rank that it contacts waits for 1 decode rank" in text
    contacts = [line.split()[:5] for line in out.splitlines() if re.match(r"\d", line)]
    assert contacts == [
        ["1", "2", "0", "1", "real"],
        ["2", "2", "0", "0", "real"],
        ["3", "3", "0", "1", "real"],
        ["4", "3", "0", "0", "real"],
    ]


@pytest.mark.parametrize(
    ("prefill", "sentence"),
    [
        ("tp=1", "room 11 is at dp rank 0 (the only one)"),
        ("tp=1,dp=4", "room 11 is at dp rank 3 (room modulo dp size 4)"),
        ("tp=1,dp=4,follow_room=no", "room 11: dp rank not known (only its registry knows)"),
        ("tp=1,dp=4,dynamic_dp=yes", "room 11: dp rank not known (only its registry knows)"),
    ],
)
def test_a_room_s_dp_rank_is_told_where_the_rule_holds(map_engines, prefill, sentence):
    assert sentence in map_engines("--decode", "tp=1", "--prefill", prefill, "--room", "11")[1]


def test_large_engines_are_summarised_unless_full(map_engines):
    pair = ("--decode", "tp=1024", "--prefill", "tp=512,dp=2")
    _, short, _ = map_engines(*pair)
    assert "decode tp 2i and 2i+1 read prefill tp i" in short
    assert len(short.splitlines()) < 40
    assert "504 more rows like these; --full shows them" in short
    assert "1022-1023" in short
    _, whole, _ = map_engines(*pair, "--full")
    rows = [line.split() for line in whole.splitlines()]
    for rank in (0, 500, 1023):
        assert [str(rank), "0", str(rank // 2), "-", "0", "0", "1", "2"] in rows
    assert sum(row[3:4] == ["real"] for row in rows) == 512


SUMMARY = """\
decode tp i reads prefill tp 4i and contacts 4i+1 to 4i+3 as dummies: they wait
  for it, too
of cp 0 to 3 only cp 0 is read, the others are idle
each decode stage reads the prefill stage of its own number
"""
SUMMARY_ROWS = """\
prefill tp  cp   pp   role   -> decode tp  pp    waits for
----------  ---  ---  -----  ------------  ----  ---------
0           0    0-1  real   0             same          1
1-3         0    0-1  dummy  0             same          1
4           0    0-1  real   1             same          1
5-7         0    0-1  dummy  1             same          1
8           0    0-1  real   2             same          1
9-11        0    0-1  dummy  2             same          1
12          0    0-1  real   3             same          1
13-15       0    0-1  dummy  3             same          1
0-15        1-3  0-1  idle   -             -             0
"""


def test_the_summary_names_dummies_idle_ranks_and_stages(map_engines):
    _, out, _ = map_engines("--decode", "tp=4,pp=2", "--prefill", "tp=16,pp=2,cp=4", "--kv", "mla")
    assert SUMMARY in out
    assert SUMMARY_ROWS in out
    _, out, _ = map_engines("--decode", "tp=24,pp=2,all_cp=yes", "--prefill", "tp=12,pp=2,cp=4")
    assert "all 4 cp ranks are read" in out
    assert ["0-1", "0-1", "0", "-", "0-3", "same", "4", "2"] in [line.split() for line in out.splitlines()]
    _, out, _ = map_engines("--decode", "tp=2,pp=1", "--prefill", "tp=6,pp=3", "--rank", "1")
    assert "decode tp i reads prefill tp 3i to 3i+2" in out
    assert ["9", "5", "0", "0", "real", "1"] in [line.split() for line in out.splitlines()]


SIZES = [
    ({"attn_tp_size": tp, "pp_size": pp, "kv": kv}, {"attn_tp_size": other, "pp_size": stages} | rest)
    for tp, other in ((1, 1), (65_535, 1), (1, 4096), (4096, 4096), (3, 48))
    for kv in ("mha", "mla", "hybrid_mla")
    for pp, stages, rest in (
        (1, 1, {}),
        (2, 2, {"attn_cp_size": 2}),
        (1, 4, {"dp_size": 4}),
        (1, 1, {"enable_kv_cache_sharding": True}),
        (1, 2, {"attn_cp_size": 8, "enable_dsa_cache_layer_split": True}),
    )
    if tp * pp <= 65_536 and other * stages * rest.get("dp_size", 1) * rest.get("attn_cp_size", 1) <= 65_536
]


@pytest.mark.parametrize(("decode", "prefill"), SIZES)
def test_no_line_is_wider_than_80_columns(decode, prefill):
    pair = Pair(DecodeEngine({"engine_rank": 0, **decode}), disagg.PrefillInfo(**prefill))
    for rank in (None, decode["attn_tp_size"] - 1):
        lines = render(pair, room=None, rank=rank, full=False).splitlines()
        assert max(map(len, lines)) <= WIDTH == 80
        assert len(lines) < 80


def test_json_has_every_rank_as_the_library_maps_it(map_engines):
    document = described(
        map_engines, "--decode", "tp=2,pp=2,dp=3", "--prefill", "tp=4,pp=2,cp=2", "--kv", "mla", "--room", "9"
    )
    assert (document["schema"], document["fits"], document["reasons"]) == (1, True, [])
    assert document["room"] == {"room": 9, "dp_rank": 0, "source": "the only one"}
    prefill = disagg.PrefillInfo(attn_tp_size=4, pp_size=2, attn_cp_size=2)
    assert [(rank["pp_rank"], rank["tp_rank"]) for rank in document["decode_ranks"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for shown in document["decode_ranks"]:
        tp, pp = shown["tp_rank"], shown["pp_rank"]
        decode = disagg.DecodeRank(attn_tp_size=2, engine_rank=tp, pp_size=2, pp_rank=pp, kv="mla")
        mapping = disagg.map_ranks(decode, prefill)
        assert shown["engine_ranks"] == [tp, 2 + tp, 4 + tp]
        assert shown["target_tp_rank"] == mapping.target_tp_rank
        for name in ("target_tp_ranks", "dummy_tp_ranks", "target_cp_ranks", "target_pp_ranks"):
            ranks = getattr(mapping, name)
            assert shown[name] == [ranks[0], ranks[-1]]
        assert shown["required_prefill_response_num"] == mapping.required_prefill_response_num
        assert shown["required_dst_info_num"] == mapping.required_dst_info_num
    assert len(document["prefill_ranks"]) == 16
    for shown in document["prefill_ranks"]:
        served = disagg.serve_ranks(
            decode, prefill, tp_rank=shown["tp_rank"], cp_rank=shown["cp_rank"], pp_rank=shown["pp_rank"]
        )
        assert (shown["role"], shown["decode_pp_rank"]) == (served.role, served.decode_pp_rank)
        assert shown["required_dst_info_num"] == served.required_dst_info_num
        readers = served.decode_tp_ranks
        assert shown["decode_tp_ranks"] == ([readers[0], readers[-1]] if readers else [])


@pytest.mark.parametrize(
    ("side", "spec", "field", "value"),
    [
        ("decode", "all_cp=yes", "all_cp_ranks", True),
        ("decode", "kv_heads=8", "num_kv_heads", 8),
        ("decode", "dcp=1", "dcp_size", 1),
        ("decode", "equal_tp=on", "requires_equal_tp", True),
        ("decode", "strict_dtype=true", "strict_dtype", True),
        ("decode", "dp=3", "dp_size", 3),
        ("decode", "pp=1", "pp_size", 1),
        ("decode", "cp=1", "attn_cp_size", 1),
        ("decode", "page_size=32", "page_size", 32),
        ("decode", "dtype=bf16", "kv_cache_dtype", "bf16"),
        ("decode", "layout=hnd", "kv_layout", "hnd"),
        ("decode", "policy=early", "decode_allocation_policy", "early"),
        ("prefill", "layer_split=yes", "enable_dsa_cache_layer_split", True),
        ("prefill", "sharding=yes", "enable_kv_cache_sharding", True),
        ("prefill", "follow_room=no", "follow_bootstrap_room", False),
        ("prefill", "dynamic_dp=yes", "dynamic_dp_size", True),
        ("prefill", "dp=3", "dp_size", 3),
        ("prefill", "cp=2", "attn_cp_size", 2),
        ("prefill", "pp=2", "pp_size", 2),
        ("prefill", "layout=hnd", "kv_layout", "hnd"),
    ],
)
def test_each_key_sets_its_field(map_engines, side, spec, field, value):
    specs = {"decode": "tp=1", "prefill": "tp=1"}
    bare = described(map_engines, "--decode", "tp=1", "--prefill", "tp=1")[side]
    specs[side] += f",{spec}"
    set_to = described(map_engines, "--decode", specs["decode"], "--prefill", specs["prefill"])[side]
    assert set_to == bare | {field: value}


def test_json_of_one_rank_has_what_it_concerns(map_engines):
    document = described(map_engines, "--decode", "tp=2", "--prefill", "tp=4", "--kv", "mla", "--rank", "1")
    assert [rank["tp_rank"] for rank in document["decode_ranks"]] == [1]
    assert [(rank["tp_rank"], rank["role"]) for rank in document["prefill_ranks"]] == [(2, "real"), (3, "dummy")]


def test_json_of_a_pair_that_does_not_fit_has_the_reasons_and_status_1(map_engines):
    document = described(map_engines, "--decode", "tp=3", "--prefill", "tp=2", status=1)
    assert document["fits"] is False
    (reason,) = document["reasons"]
    assert (reason["kind"], reason["severity"], reason["decode"], reason["prefill"]) == (
        "tp_divisibility",
        "fatal",
        3,
        2,
    )
    assert "decode_ranks" not in document


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("tp=8,tpp=1", "tp=1"), "--decode tpp: no such key; there are tp, cp, pp, dp, page_size, dtype, "),
        (("tp=8", "tp=1,heads=1"), "--prefill heads: no such key; there are tp, cp, pp, dp, page_size, "),
        (("tp=x", "tp=1"), "--decode tp=x: must be a whole number"),
        (("tp=-1", "tp=1"), "--decode tp=-1: must be a whole number"),
        (("tp=\u0663", "tp=1"), "--decode tp=\u0663: must be a whole number"),
        (("tp=" + "9" * 5000, "tp=1"), "must have at most 18 digits"),
        (("tp=0", "tp=1"), "--decode attn_tp_size 0: must be from 1 to 65535"),
        (("tp=1", "tp=99999"), "--prefill attn_tp_size 99999: must be from 1 to 65535"),
        (("tp=1", "tp=1,cp=512,pp=512"), "--prefill dp x cp x tp x pp is 262144: must be at most 65536"),
        (("tp=4096,dp=4096", "tp=1"), "--decode dp x cp x tp x pp is 16777216: must be at most 65536"),
        (("tp=1,dtype=\udcff", "tp=1"), "\\udcff': must be UTF-8"),
        (("\x1b[2J\nx=4", "tp=1"), "--decode \\x1b[2J\\x0ax: no such key; "),
        (("tp=1", "http://h:1?a=b"), "--prefill http://h:1?a=b: address has a path or user part"),
        (("tp=1", "tp=1", "--svg", "{tmp}/" + "x" * 300), "x: file name too long"),
        (("tp=1,dp=0", "tp=1"), "--decode dp=0: must be from 1 to 65535"),
        (("tp=1,tp=2", "tp=1"), "--decode tp: given twice"),
        (("tp=1,pp=", "tp=1"), "--decode pp: has no value; give pp=VALUE"),
        (("pp=1", "tp=1"), "--decode pp=1: has no tp; give at least tp=SIZE"),
        (("", "tp=1"), "--decode '': has no tp; give at least tp=SIZE"),
        (("tp=1", "tp=1,sharding=maybe"), "--prefill sharding=maybe: must be yes or no"),
        (("tp=1", "tp=1", "--kv", "gqa"), "--kv gqa: must be one of mha, mla, hybrid_mla"),
        (("tp=4", "tp=1", "--rank", "4"), "--rank 4: must be from 0 to 3, below the decode engine's tp x dp"),
        (("tp=1", "tp=1", "--room", "-1"), "--room -1: must be from 0 to 9223372036854775807"),
        (("tp=1", "tp=1", "--svg", "/no/such/folder/x.svg"), "--svg /no/such/folder/x.svg: there is no folder "),
        (("tp=4096", "tp=4096", "--svg", "{tmp}/x.svg"), "--svg: tp 4096 is too large to draw, at most 2048; --json "),
        (("tp=1", "http://h:99999"), "--prefill http://h:99999: port is not a number from 1 to 65535"),
        (("tp=1", "https://h"), "--prefill https://h: address is a URL; give host:port"),
        (("tp=1", "h:1", "--timeout-s", "0"), "--timeout-s 0: must be from 0.01 to 600 seconds"),
    ],
)
def test_a_wrong_option_is_one_line_with_the_value_and_the_rule(map_engines, tmp_path, arguments, line):
    decode, prefill, *others = arguments
    others = [other.format(tmp=tmp_path) for other in others]
    status, _, err = map_engines("--decode", decode, "--prefill", prefill, *others)
    assert status == 2
    assert err.startswith("disagg map: ")
    assert line in err
    assert err.count("\n") == 1


def test_an_option_that_is_missing_is_named(map_engines):
    status, out, err = map_engines("--decode", "tp=1")
    assert (status, out) == (2, "")
    assert "--prefill" in err


@pytest.mark.parametrize("output", [(), ("--json",)])
def test_output_that_cannot_be_written_is_one_line(output):
    command = [sys.executable, "-m", "disagg.cli", "map", "--decode", "tp=4", "--prefill", "tp=4", *output]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (
        2,
        "disagg: the output could not be written: no space left on device\n",
    )


def test_a_reader_that_has_gone_and_a_terminal_without_letters_are_no_tracebacks():
    command = [sys.executable, "-m", "disagg.cli", "map", "--decode", "tp=4,dtype=\xe9", "--prefill", "tp=4,dtype=\xfc"]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    ended = subprocess.run(command, capture_output=True, env=ascii_only, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (1, b"")
    assert b"\\xe9 here, \\xfc at the prefill" in ended.stdout
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")
