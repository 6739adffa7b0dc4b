"""`disagg simulate`: one decode scheduler against prefill engines that behave, and misbehave, over real HTTP.

Who does what, each line its own process:

- the parent (`runner`) plans all requests, shows progress, and judges every end with its own `ledger`;
- prefill workers (`prefill`) run the engines: real registries, or what is silent, refuses or talks rubbish;
- the feeder (`feeder`) writes each arrival into a shared log when it is due;
- the scheduler (`scheduler`) runs a loop, a cycle each millisecond, and one decode rank's Resolver, no more;
- the control (`scheduler` too) runs the same loop on the same arrivals at the same time, without a Resolver.

Times in messages between the processes are nanoseconds of the system's monotonic clock, which they share.
"""
