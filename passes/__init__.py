"""The passes over the joint graph, one a file, in the order they run (`manager.rewrite_joint_graph`):

1.  `materialise_conjugates`  regions must not hand lazily conjugated tensors to each other
2.  `find_steps`         which region calls are steps, and what their boundaries are; everything below speaks of these
3.  `group_streams`      which steps follow one path; each path is placed, scored and interpolated by itself
4.  `check_eligibility`  refuse before anything is changed what would come out wrong
5.  `weigh_steps`        write down each step's weights at the knots: the next three need them
6.  `score_segments`     decide what is interpolated, while every velocity and cotangent is still there
7.  `record_statistics`  hand the numbers out, before cotangents are replaced
8.  `interpolate_vjps`   the one pass that changes numbers: composite cotangents for the knots
9.  `route_segments`     take the other steps' backward calls away, or keep them in branches for what is not interpolated
10. `reread_operands`    regions' outputs that lie in their operands' memory are read from there
11. `drop_saved`         after these, nobody reads what intermediate steps saved
12. `clean_up`           last: the others may leave markers, dead nodes and nodes out of order

`emit` is how passes write new nodes, `value_numbers` how they tell equal ones, `manager` how Inductor calls them.
"""
