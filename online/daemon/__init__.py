"""The learner daemon: settings, state machine, main loop."""
