"""What scripts/chaos runs: real schedulers and writers that are killed, and a check that nothing was lost.

`conductor` runs a round: it has the `nursery` fork the processes (`scheduler`, `writer`, `hands`), kills them, and has
`check` compare at the end. `disturb` delays, cuts and kills inside the processes; `cast` says which Dags and events there are.
"""
