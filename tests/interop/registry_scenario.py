"""SGLang's own code against a registry, in a process of its own: its configuration is process-wide, one version each.

registry_scenario.py TOOLS SITE ADDRESS SCENARIO    prints what the real code did and saw, one JSON object
"""

import json
import sys
import time
import types


def main(tools, site, address, scenario):
    sys.path.insert(0, tools)
    from real_sglang import load

    sg = load(site)
    if scenario in SCENARIOS_OF_0_5_23:
        from sglang_rig import Rig

        host, _, port = address.rpartition(":")
        rig = Rig(sg, bootstrap_host=host, bootstrap_port=int(port))
        seen = SCENARIOS_OF_0_5_23[scenario](rig)
    else:
        seen = SCENARIOS_OF_OLD[scenario](sg.conn, address)
    sys.stdout.write(json.dumps(seen) + "\n")


# 0.5.23, era E7: whole managers and a whole decode queue.


def prefill(rig):
    return {"ports": [manager.rank_port for manager in register(rig, tp=1, dp=1)]}


def decode(rig):
    return resolve(rig, [(4, None)])


def follow(rig):
    """A tp 2 x dp 2 prefill whose dp rank is the room modulo 2."""
    ports = [manager.rank_port for manager in register(rig, tp=2, dp=2)]
    return {"ports": ports, **resolve(rig, [(4, None), (5, None)])}


def round_robin(rig):
    """A dp 2 prefill whose rooms are registered by its own senders, then asked for."""
    managers = register(rig, tp=1, dp=2, load_balance_method="round_robin")
    rig.sender(managers[1], 40)
    rig.sender(managers[0], 41)
    ports = [manager.rank_port for manager in managers]
    return {"ports": ports, **resolve(rig, [(40, None), (41, None)])}


def incomplete(rig):
    """Of a tp 2 prefill one rank comes late: before, there is no topology."""
    rig.manager("prefill", attn_tp_size=2, attn_tp_rank=0)
    waiting = rig.manager("decode", attn_tp_size=1, attn_tp_rank=0)
    address = f"{rig.host}:{rig.port}"
    early = waiting.try_ensure_parallel_info(address)
    rig.manager("prefill", engine_rank=1, attn_tp_size=2, attn_tp_rank=1)
    rig.configure(attn_tp_size=1)
    return {"early": bool(early), "late": bool(waiting.try_ensure_parallel_info(address)), **known(rig, waiting)}


def restarted(rig):
    """An engine of tp 1, then one of tp 2 behind the same registry."""
    register(rig, tp=1, dp=1)
    ports = [manager.rank_port for manager in register(rig, tp=2, dp=1)]
    return {"ports": ports, **resolve(rig, [(7, None)])}


def register(rig, tp, dp, **configuration):
    """Make, and so register, every rank of a prefill engine, dp by dp."""
    managers = []
    for dp_rank in range(dp):
        for tp_rank in range(tp):
            sizes = {"attn_tp_size": tp, "attn_tp_rank": tp_rank, "attn_dp_size": dp, "attn_dp_rank": dp_rank}
            engine_rank = dp_rank * tp + tp_rank
            managers.append(rig.manager("prefill", engine_rank=engine_rank, **sizes, **configuration))
    return managers


def resolve(rig, requests):
    """What a real DecodePreallocQueue of one rank makes of (room, dp rank) requests."""
    rig.configure(attn_tp_size=1)
    manager = rig.manager("decode")
    queue = rig.queue(manager)
    entries = [rig.enqueue(queue, rig.request(room, dp_rank=dp_rank)) for room, dp_rank in requests]
    failed, deadline = [], time.monotonic() + 20
    while not all(entry.waiting_for_input for entry in entries) and not failed and time.monotonic() < deadline:
        failed += queue.pop_preallocated()[1]
        time.sleep(0.01)
    receivers = [entry.kv_receiver for entry in entries]
    return {
        "failed": [str(entry.req.finished_reason.message) for entry in failed],
        "dp_ranks": [receiver.prefill_dp_rank for receiver in receivers],
        "endpoints": [[info["rank_port"] for info in receiver.bootstrap_infos or ()] for receiver in receivers],
        **known(rig, manager),
    }


def known(rig, manager):
    info = manager.prefill_info_table.get(f"{rig.host}:{rig.port}")
    return {"info": info and {name: getattr(info, name) for name in ("attn_tp_size", "dp_size", "page_size")}}


# 0.5.10, era E4, and 0.5.9, era E2: the methods that speak to the registry, on bare objects.


def bare(address):
    host, _, port = address.rpartition(":")
    server = types.SimpleNamespace(
        kv_cache_dtype="auto", load_balance_method="follow_bootstrap_room", enable_hisparse=False
    )
    return types.SimpleNamespace(
        attn_tp_size=1, attn_tp_rank=0, attn_cp_size=1, attn_cp_rank=0, attn_dp_size=1, attn_dp_rank=0, pp_size=1,
        pp_rank=0, system_dp_size=1, system_dp_rank=0, local_ip="127.0.0.1", rank_port=4321, dist_init_addr=None,
        bootstrap_host=host, bootstrap_port=int(port), bootstrap_addr=address, server_args=server,
        kv_args=types.SimpleNamespace(page_size=64, engine_rank=0), prefill_info_table={},
        _resolve_rank_mapping=lambda info: None,
    )  # fmt: skip


def prefill_e4(conn, address):
    conn.CommonKVManager.register_to_bootstrap(bare(address))
    return {"ports": [4321]}


def decode_e4(conn, address):
    me = bare(address)
    ready = conn.CommonKVManager.try_ensure_parallel_info(me, address)
    info = me.prefill_info_table.get(address)
    rank = conn.CommonKVReceiver._get_bootstrap_info_from_server(me, 0, 0, 0, 0) if ready else None
    return {
        "info": info and {name: getattr(info, name) for name in ("attn_tp_size", "dp_size", "page_size")},
        "endpoints": [[rank and rank["rank_port"]]],
    }


def prefill_e2(conn, address):
    me = bare(address)
    # The way of several nodes: that of one node goes through a function that is stood in for.
    me.dist_init_addr = address
    conn.CommonKVManager._register_to_bootstrap(me)
    return {"ports": [4321]}


def decode_e2(conn, address):
    me = bare(address)
    tp, dp, _, page = conn.CommonKVReceiver._get_prefill_parallel_info_from_server(me)
    rank = conn.CommonKVReceiver._get_bootstrap_info_from_server(me, 0, 0, 0)
    return {
        "info": {"attn_tp_size": tp, "dp_size": dp, "page_size": page},
        "endpoints": [[rank and rank["rank_port"]]],
    }


def table(*scenarios):
    return {scenario.__name__: scenario for scenario in scenarios}


SCENARIOS_OF_0_5_23 = table(prefill, decode, follow, round_robin, incomplete, restarted)
SCENARIOS_OF_OLD = table(prefill_e4, decode_e4, prefill_e2, decode_e2)

if __name__ == "__main__":
    main(*sys.argv[1:])
