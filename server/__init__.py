"""The gating aggregator: decides, remembers, aggregates, counts. Needs numpy, never torch."""
