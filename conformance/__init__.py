"""The conformance suite: a float64 oracle, its tolerance, adversarial cases, and the way to drive any backend through them."""
