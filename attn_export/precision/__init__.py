"""fp16, bf16 and int8 graphs, made from the lowered float32 one; each says how it is judged.

`names` tells what is built for which target, `plan` which nodes stay float32 and why, `convert`
puts the Casts in, `half` and `int8` make a graph, `yardstick` and `bounds` judge it.
"""
