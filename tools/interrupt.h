// Ctrl-C: the first one is a request to end soon and in order, a second one ends the process.
#pragma once

namespace ferry::tools {

// From now on SIGINT, SIGTERM and SIGHUP are such requests, but for those that are ignored already.
void catch_interrupts();
bool interrupted() noexcept;
// Ends the process by the signal that was caught, as whoever waits for it expects. Returns where
// none was.
void end_if_interrupted();

}  // namespace ferry::tools
