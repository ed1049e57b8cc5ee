"""x"""
import sys, pathlib
sys.path.insert(0, str(pathlib.Path(__file__).parent))
from pipeline_simulation import *
from shiftbook.ledger.events.job import ElasticRange
from shiftbook.ledger.plan import MovePlan
from shiftbook.ledger.topology import Device
from shiftbook.scheduler.planner import Planner
from shiftbook.scheduler.throughput import ThroughputModel

ELASTIC = {n: ElasticRange(minimum=1, maximum=2) for n in ("rollout", "inference", "trainer")}

def run(work, start, iterations, seed, plan):
    job = Job(work, start, seed)
    model = ThroughputModel()
    planner = Planner(model, ELASTIC, [Device(name=d) for d in on(0, 1)], MovePlan())
    ticks, seen, decs = 0, 0, []
    while job.iteration < iterations:
        job.step(); ticks += 1
        if ticks % 50: continue
        window = job.window(0.05)
        p = job.progress()
        model.observe(window, LANES); model.observe_progress(p)
        for m in job.measured[seen:]: model.observe_iteration(m)
        seen = len(job.measured)
        if plan and job.pending is None:
            d = planner.decide(window, job.topology, p, job.now_s)
            if d:
                kind, cost = job.move(d.after); model.observe_move(kind, cost); planner.moved(job.now_s)
                decs.append((job.iteration, round(p.elapsed_s,3), p.outstanding, d.kind, d.after.text(), round(d.net_gain_s,3), round(d.probability,2), round(p.elapsed_s+d.move.mean_s,3)))
    return job, model, decs
if __name__ == "__main__":
    import statistics as st
    for seed in (1, 2):
        w = Workload()
        s, *_ = run(w, topology([0], [1]), 6, seed, False)
        t, *_ = run(w, topology([0, 1], [0, 1]), 6, seed, False)
        d, m, decs = run(w, topology([0, 1], [1]), 6, seed, True)
        print([round(x,3) for x in s.walls]); print([round(x,3) for x in t.walls]); print([round(x,3) for x in d.walls])
        for x in decs: print(x)
        print({k: round(getattr(m,k).mean,4) for k in ("turn_s","tail_s","lane_share","turns_per_episode","update_s")}, {k:round(v.mean,4) for k,v in m.follower_s.items()}, {k:round(v.mean,4) for k,v in m.move_s.items()})
