// How many threads may work, of those that are asked for: in a child that was forked one, since OpenMP waits there for
// threads that it has not.
#pragma once

int allowed(int threads);
