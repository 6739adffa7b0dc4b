"""Reading what `disagg map` prints."""

import json


def described(map_engines, *arguments, status=0):
    ended, out, err = map_engines(*arguments, "--json")
    assert (ended, err) == (status, "")
    return json.loads(out)
