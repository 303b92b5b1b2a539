"""The passes over the joint graph, one a file, in the order they run (`manager.rewrite_joint_graph`):

1. `find_steps`         which region calls are steps, and what their boundaries are; everything below speaks of these
2. `check_eligibility`  refuse before anything is changed what would come out wrong
3. `weigh_steps`        write down each step's weights at the knots: the next three need them
4. `score_segments`     decide what is interpolated, while every velocity and cotangent is still there
5. `record_statistics`  hand the numbers out, before cotangents are replaced
6. `interpolate_vjps`   the one pass that changes numbers: composite cotangents for the knots
7. `route_segments`     take the other steps' backward calls away, or keep them in branches for what is not interpolated
8. `drop_saved`         after both, nobody reads what intermediate steps saved
9. `clean_up`           last: the others may leave markers, dead nodes and nodes out of order

`emit` is how passes write new nodes, `manager` how Inductor calls them.
"""
