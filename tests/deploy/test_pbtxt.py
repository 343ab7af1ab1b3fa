from __future__ import annotations

from attn_export.deploy.pbtxt import Enum, dumps, entries


def test_fields_messages_lists_and_maps() -> None:
    message = {
        "name": 'quo"te', "size": 3, "kind": Enum("KIND_CPU"), "on": True, "dims": [3, -1],
        "input": [{"name": "a"}, {"name": "b"}],
        "parameters": entries({"k": {"string_value": "v"}}),
    }  # fmt: skip
    assert dumps(message).splitlines() == [
        'name: "quo\\"te"', "size: 3", "kind: KIND_CPU", "on: true", "dims: [3, -1]",
        "input {", '  name: "a"', "}", "input {", '  name: "b"', "}",
        "parameters {", '  key: "k"', "  value {", '    string_value: "v"', "  }", "}",
    ]  # fmt: skip
