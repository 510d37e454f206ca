// Stands in where the build has no MPI.
#ifndef FERRY_MPI

#include "comm/comm.h"

namespace ferry::comm {

std::unique_ptr<Communicator> make_mpi(Executor&, const CommOptions&) {
    throw Error(Trouble::usage,
                {.what = "this ferry was built without MPI and cannot be one of several ranks",
                 .where = "the environment of mpirun or srun",
                 .remedy = "build it where MPI is found (libopenmpi-dev, -DFERRY_MPI=ON), or "
                           "start it alone"});
}

void say_once(const Error&, const std::function<void()>& say, const std::function<bool()>&) {
    say();
}

}  // namespace ferry::comm

#endif
