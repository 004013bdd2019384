"""From records to a candidate draft, and the gate that judges it."""
