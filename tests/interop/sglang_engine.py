"""A real prefill engine of SGLang 0.5.23 in a process of its own: its bootstrap server, and its ranks registered there.

sglang_engine.py TOOLS SITE PORT CONFIGURATION    CONFIGURATION is JSON: tp, dp, load_balance_method, rooms

Prints the ranks' ports as JSON once all have registered, then serves until its standard input ends.
"""

import json
import sys
import time


def main(tools, site, port, configuration):
    sys.path.insert(0, tools)
    from real_sglang import load
    from sglang_rig import Rig

    sg = load(site)
    server = sg.conn.CommonKVBootstrapServer("127.0.0.1", int(port))
    wait_until_listening(int(port))
    rig = Rig(sg, bootstrap_port=int(port))
    options = json.loads(configuration)
    tp, dp = options["tp"], options["dp"]
    managers = [
        rig.manager(
            "prefill",
            engine_rank=dp_rank * tp + tp_rank,
            attn_tp_size=tp,
            attn_tp_rank=tp_rank,
            attn_dp_size=dp,
            attn_dp_rank=dp_rank,
            load_balance_method=options["load_balance_method"],
        )
        for dp_rank in range(dp)
        for tp_rank in range(tp)
    ]
    for room, dp_rank in options["rooms"].items():
        rig.sender(managers[dp_rank * tp], int(room))
    sys.stdout.write(json.dumps([manager.rank_port for manager in managers]) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.close()


def wait_until_listening(port):
    import socket

    until = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
