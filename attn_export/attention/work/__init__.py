"""Work that reaches no output, taken out of a canonical graph before its sites are lowered."""
