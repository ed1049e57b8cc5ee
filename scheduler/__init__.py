"""The hands: worker groups on Ray, telemetry, throughput model, planner and controller."""
