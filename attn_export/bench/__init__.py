"""Measure runtimes: each in its own process, its parity checked in that very process first."""
