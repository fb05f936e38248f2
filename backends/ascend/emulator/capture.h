// What the runtime asks of the graphs (capture.cpp, replay.cpp) where it is about to enqueue, to wait or to copy.
#pragma once

#include "device.h"

namespace device {

// Each of these puts into the graph what is issued on a stream that is being captured, where nothing runs.  Refused
// (207008) where there is no room for more, which is the end of that capture.
aclError capture(Stream* stream, Task task);
aclError capture_operator(Stream* stream, Entry entry, const Launch& launch);
aclError capture_collective(Stream* stream, Entry entry, Issue issue, Turn turn, void* collective,
                            Range reads);
aclError capture_record(Stream* stream, Event* event);
// Also where the stream is not captured yet, and the event's record is: it joins.
aclError capture_wait(Stream* stream, Event* event);

// An operator that is issued between the begin and the end of an update: it will take the place of one in a graph.
aclError change(Stream* stream, const Launch& launch);
// Something else that is issued there, which the end of the update refuses.
aclError change_nothing(Stream* stream);

// Why a host may not wait for a stream now, for any, or for an event, or do what blocks it; 0 where it may.
aclError may_wait(Stream* stream);
aclError may_wait_for_all();
aclError may_ask(const Event* event);
aclError may_block(const char* what);

// After a fault: replays that were waiting are thrown away with the streams' tasks.
void recover_graphs();

}  // namespace device
