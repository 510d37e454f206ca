// Ctrl-C: the first one is a request to end soon and in order, a second one ends the process.
#pragma once

namespace ferry::tools {

// From now on these signals, unless they are ignored, end the process as ever, and leave no drafts
// of its files (base/files.h).
void leave_no_drafts();
// From now on SIGINT, SIGTERM and SIGHUP are such requests, unless SIGHUP is ignored already. So is
// any number of SIGUSR1, which mpirun passes on to its ranks without ending them by itself. Calls
// of the system that wait go on waiting, except poll(). Called again after a request, the next one
// is a request as well.
void catch_interrupts();
int requests() noexcept;  // until now
inline bool interrupted() noexcept { return requests() > 0; }
// Ends the process by the signal that was caught, as whoever waits for it expects. Returns where
// none was.
void end_if_interrupted();

}  // namespace ferry::tools
