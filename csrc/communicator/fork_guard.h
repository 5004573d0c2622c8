// What a forked child inherits: dead handles. Its copies of the sockets are closed at once, so
// that peers notice the parent's death even while a child lives on.
#pragma once

namespace pycomm::communicator {

// Installs the handler, once.
void watch_forks();
bool is_forked_child();
// Close `fd` in every child forked from now on; no more.
void forget_after_fork(int fd);
void forget_no_more(int fd);

}  // namespace pycomm::communicator
