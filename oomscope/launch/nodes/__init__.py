"""A job on several nodes: the supervisors of the nodes find each other, pass alarms on, and gather the records.

One supervisor, that of the node with rank 0, is the *hub*; the others are its *members*. The hub opens one HTTP port,
on the address where the ranks meet too and only once a job of several nodes asks for it; each request carries a token
that reached the members through the job's own store. Members append what their ranks write to the hub's attempt, so
that one session shows the whole job, with a shared file system or without. An alarm goes from a rank to its
supervisor, to the hub, to the other members and to their ranks.
"""
