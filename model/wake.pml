/* The protocol of wake requests (spec 4 to 7), for the model checker spin; scripts/model runs it.
 *
 * One Dag with two pending runs, and four transactions that change something: two add a key log to run 0, two store a
 * definition. Two schedulers run loops for ever. READ COMMITTED: each statement is one atomic step that sees
 * what is committed at that moment, and what a transaction writes is seen by others once it commits. After each
 * statement the loop may fail and be retried, or its process may die.
 *
 * The property, checked at every commit: a change that is committed, and that no committed evaluation of a run that it
 * concerns has seen, has its request in the table. A scheduler's memory does not count, as it goes with the process.
 *
 * Each macro of scripts/model's list breaks one rule.
 */

#define RUNS 2
#define CHANGES 4
#define KEY_LOGS 3		/* changes 0 and 1 */
#define DEFINITIONS 12		/* changes 2 and 3 */

#define BIT(n) (1 << (n))
#define HAS(set, n) (((set) >> (n)) & 1)
#define CONCERNS(r) (DEFINITIONS | ((r) == 0 -> KEY_LOGS : 0))

/* The database. Sets are bits: of changes, or of runs. */
byte committed;			/* changes */
byte requests;			/* changes whose request is in the table */
byte fired;			/* runs */
byte locked;			/* runs */
byte seen[RUNS];		/* changes that a committed evaluation of the run has seen, or that came too late for it */

#ifdef DELETE_UP_TO
byte next_id = 1;
byte id[CHANGES];
#endif

inline nothing_is_lost() {
	r = 0;
	do
	:: r < RUNS -> assert(!(committed & CONCERNS(r) & ~seen[r] & ~requests)); r++
	:: else -> break
	od;
	r = 0
}

/* Transactions that change something. Two of a kind differ in nothing, so that one may as well come after the other. */
proctype writer(byte change, end) {
	byte r;

	do
	:: change < end ->
#ifdef DELETE_UP_TO
		d_step { id[change] = next_id; next_id++ }	/* the INSERT: before the commit */
#endif
#ifdef REQUEST_FIRST
		requests = requests | BIT(change);
		d_step { committed = committed | BIT(change); nothing_is_lost(); change++ }
#else
		d_step {
			committed = committed | BIT(change);
			requests = requests | BIT(change);
			nothing_is_lost();
			change++
		}
#endif
	:: else -> break
	od
}

/* The next run of the fan-out: one a loop, those that a peer had locked first. */
inline next_of_fan_out() {
	if
	:: draft_held ->
		of_fan_out = (HAS(draft_held, 0) -> BIT(0) : BIT(1));
		draft_held = draft_held & ~of_fan_out
	:: else ->
		do
		:: draft_after < RUNS && HAS(fired, draft_after) -> draft_after++
		:: else -> break
		od;
		if
		:: draft_after < RUNS -> of_fan_out = BIT(draft_after); draft_after++
		:: else -> exhausted = 1
		fi
	fi;
	asked = of_fan_out
}

inline keep_progress() {
	fan_out = draft; after = draft_after; held = draft_held
}

inline forget_progress() {
	fan_out = 0; after = 0; held = 0
}

/* Evaluate a run that the loop has locked. */
inline see(nth) {
	if
	:: HAS(got, nth) -> seen[nth] = seen[nth] | (saw & CONCERNS(nth))
	:: HAS(got, nth) -> assert(!HAS(fired, nth)); fired = fired | BIT(nth); seen[nth] = CONCERNS(nth)
	:: else
	fi
}

#ifdef DELETE_UP_TO
/* Delete every request of a kind up to the highest id that was answered. */
inline up_to(kind) {
	r = 0;
	highest = 0;
	do
	:: r < CHANGES ->
		highest = (HAS(answered & kind, r) && id[r] > highest -> id[r] : highest);
		r++
	:: else -> break
	od;
	r = 0;
	do
	:: r < CHANGES ->
		answered = answered | (HAS(kind, r) && id[r] <= highest -> BIT(r) : 0);
		r++
	:: else -> break
	od;
	r = 0;
	highest = 0
}
#endif

/* The end of a loop's transaction, in any way. */
inline end_loop() {
	locked = locked & ~got;
	draft = 0; draft_after = 0; draft_held = 0; exhausted = 0;
	read = 0; asked = 0; of_fan_out = 0; got = 0; gone = 0; saw = 0; answered = 0
}

/* After a statement: go on, fail and be retried, or die. */
#define THEN(next) \
	if \
	:: goto next \
	:: end_loop(); goto loop \
	:: end_loop(); forget_progress(); goto loop \
	fi

proctype scheduler() {
	/* Kept between loops: the requests that the fan-out under way answers, its cursor, the runs to try again. */
	byte fan_out, after, held;
	/* Of one loop. */
	byte draft, draft_after, draft_held, exhausted;
	byte read, asked, of_fan_out, got, gone, saw, answered;
	byte r;
#ifdef DELETE_UP_TO
	byte highest;
#endif

end_idle:
loop:
#ifdef LOGS_FIRST
	atomic {
		requests || fan_out;
		saw = committed;
		THEN(read_requests)
	}
read_requests:
#endif
	atomic {
#ifndef LOGS_FIRST
		requests || fan_out;		/* an idle loop changes nothing */
#endif
		draft = fan_out; draft_after = after; draft_held = held;
		if				/* all of them, or those from some id on: a smaller one may come later */
		:: read = requests
		:: read = requests & (1 + 4)
		:: read = requests & (2 + 8)
		fi;
		if
		:: !draft -> draft = read & DEFINITIONS
#ifdef FAN_OUT_ANSWERS_LATER
		:: draft -> draft = draft | (read & DEFINITIONS)
#endif
		:: else
		fi;
		read = read & KEY_LOGS;
		THEN(ask)
	}
ask:
	atomic {
		if
		:: draft -> next_of_fan_out()
		:: else
		fi;
		if				/* there may be room for the run that key logs ask for, or not */
		:: read -> asked = asked | BIT(0)
		:: true
		fi;
		read = (HAS(asked, 0) -> read : 0);
		THEN(lock)
	}
lock:
	atomic {				/* FOR UPDATE SKIP LOCKED, still pending */
#ifdef LOCK_UNCHECKED
		got = asked & ~locked;
#else
		got = asked & ~locked & ~fired;
#endif
		locked = locked | got;
		THEN(look_at_the_others)
	}
look_at_the_others:
	atomic {
#ifdef LOCKED_IS_ANSWERED
		gone = asked & ~got;
#else
		gone = asked & ~got & fired;
#endif
#ifndef FAN_OUT_SKIPS_LOCKED
		draft_held = draft_held | (of_fan_out & ~got & ~gone);
#endif
		if
		:: HAS(got | gone, 0) -> answered = read
		:: else
		fi;
		if
		:: draft && exhausted && !draft_held -> answered = answered | draft; draft = 0; draft_after = 0
		:: else
		fi;
		read = 0; asked = 0; of_fan_out = 0; gone = 0; exhausted = 0;
#ifdef KEEP_BEFORE_COMMIT
		keep_progress();
#endif
#ifdef DELETE_BEFORE
		requests = requests & ~answered;
#endif
#ifdef LOGS_FIRST
		THEN(commit)
#else
		if
		:: got -> THEN(read_definition)
		:: else -> THEN(commit)
		fi
#endif
	}
#ifndef LOGS_FIRST
read_definition:
	atomic {
		saw = committed & DEFINITIONS;
		if
		:: HAS(got, 0) -> THEN(read_key_logs)
		:: else -> THEN(commit)
		fi
	}
read_key_logs:
	atomic {
		saw = saw | (committed & KEY_LOGS);
		THEN(commit)
	}
#endif
commit:
	atomic {
#ifdef DELETE_UP_TO
		up_to(KEY_LOGS);
		up_to(DEFINITIONS);
#endif
		requests = requests & ~answered;
		/* What satisfies a run is not modelled: any evaluation may fire it. No run fires twice. */
		see(0);
		see(1);
		nothing_is_lost();
		keep_progress();
		end_loop();
		goto loop
	}
}

init {
	atomic {
#ifdef DELETE_UP_TO
		run writer(0, 1); run writer(1, 2); run writer(2, 3); run writer(3, 4);
#else
		run writer(0, 2); run writer(2, 4);
#endif
		run scheduler(); run scheduler()
	}
}
