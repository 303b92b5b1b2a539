"""The passes over the joint graph, one a file, in the order they run (`manager.rewrite`):

1. `find_steps`         which region calls are steps, and what their boundaries are; everything below speaks of these
2. `check_eligibility`  refuse before anything is changed what would come out wrong
3. `interpolate_vjps`   the one pass that changes numbers
4. `drop_saved`         after it, nobody reads what intermediate steps saved
5. `clean_up`           last: the others may leave markers, dead nodes and nodes out of order

`emit` is how passes write new nodes, `manager` how Inductor calls them.
"""
